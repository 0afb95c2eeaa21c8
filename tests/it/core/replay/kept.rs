//! What Redis keeps of a replay, and whom it is for.

use super::{Rig, STREAM, Tokens, add, json, mixed, replay, text};

pub(super) const MINUTE: i64 = 60_000;

/// How long a run is kept, ms; -2: there is none.
pub(super) async fn kept(rig: &Rig, id: &str) -> i64 {
    let mut connection = rig.server.connection().await;
    let name = format!("fl:replay:{id}");
    redis::cmd("PTTL").arg(name).query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn a_run_is_kept_while_it_is_of_use() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..20)).await;
    rig.got(40).await;
    let client = instance.client();
    let none = json!({ "from": "1h ago", "types": ["order.none"] });
    for _ in 0..3 {
        let (code, told) = replay(&client, &none).await;
        assert_eq!((code, &told["put"], &told["done"]), (200, &json!(0), &json!(true)), "{told}");
        assert_eq!(kept(&rig, told["id"].as_str().unwrap()).await, -2);
    }
    assert!(!rig.data().await.keys().any(|name| name.starts_with("fl:replay:")));

    let (code, told) = replay(&client, &json!({ "from": "1h ago", "id": "r", "limit": 30 })).await;
    assert_eq!((code, &told["put"], &told["done"]), (200, &json!(30), &json!(false)), "{told}");
    assert!(kept(&rig, "r").await > 24 * 60 * MINUTE, "it can be continued for days");
    let (code, told) = replay(&client, &json!({ "id": "r" })).await;
    assert_eq!((code, &told["put"], &told["done"]), (200, &json!(10), &json!(true)), "{told}");
    let left = kept(&rig, "r").await;
    assert!((MINUTE..=10 * MINUTE).contains(&left), "{left}");
    // A later run with this id puts the events again.
    let mut connection = rig.server.connection().await;
    let names = rig.data().await;
    let positions: Vec<&String> =
        names.keys().filter(|name| name.ends_with("}:replay:r")).collect();
    assert!(!positions.is_empty(), "{names:?}");
    for name in positions {
        let left: i64 = redis::cmd("PTTL").arg(name).query_async(&mut connection).await.unwrap();
        assert!((MINUTE..=10 * MINUTE).contains(&left), "{name}: {left}");
    }
    let (code, told) = replay(&client, &json!({ "id": "r" })).await;
    assert_eq!((code, &told["put"], &told["done"]), (200, &json!(0), &json!(true)), "{told}");
    rig.got(80).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_run_is_unknown_to_callers_without_access_to_its_events() {
    let all = r#"scopes = ["publish", "read", "operate"]"#;
    let tokens = Tokens::new(&[
        ("root", &format!("{all}, bots = [\"*\"]")),
        ("shop", &format!("{all}, bots = [\"a\"]")),
    ]);
    let rig = Rig::new(&[("pipelines.other.enabled", "false"), ("auth.tokens", &tokens.setting)]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..20)).await;
    rig.got(40).await;
    let by = |name: &str| instance.client().with_token(&text(name));
    for (id, asked) in [
        ("all", json!({ "from": "1h ago", "id": "all", "limit": 1 })),
        ("of-b", json!({ "from": "1h ago", "id": "of-b", "bot": "b", "limit": 1 })),
    ] {
        let (code, told) = replay(&by("root"), &asked).await;
        assert_eq!((code, &told["put"]), (200, &json!(1)), "{told}");
        let next = json!({ "cursor": told["cursor"] });
        let (code, told) = replay(&by("shop"), &next).await;
        assert_eq!(code, 404, "{told}");
        let (code, known) = replay(&by("shop"), &json!({ "id": id })).await;
        let (_, unknown) = replay(&by("shop"), &json!({ "id": "none" })).await;
        assert_eq!((code, &known["detail"]), (400, &unknown["detail"]));
        let (code, told) = replay(&by("root"), &next).await;
        assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    }
    rig.got(40 + 40 + 20).await;
    instance.stop().await;
}
