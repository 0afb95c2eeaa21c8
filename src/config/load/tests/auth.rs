//! `[auth]`: the list of tables, and the exact message for a bad one.

use super::refusal;
use crate::config::{Config, Scope};

const TOKEN: &str = r#"name = "shop", token_file = "t", scopes = ["publish"]"#;

#[test]
fn tokens_are_read_in_either_form_of_table_and_take_the_defaults() {
    let inline = format!(
        r#"auth.tokens = [{{ {TOKEN} }}, {{ name = "b", token_file = "u", scopes = ["read", "operate"], bots = ["x-*"] }}]"#
    );
    let blocks = "[[auth.tokens]]\nname = \"shop\"\ntoken_file = \"t\"\nscopes = [\"publish\"]\n\
        [[auth.tokens]]\nname = \"b\"\ntoken_file = \"u\"\nscopes = [\"read\", \"operate\"]\nbots = [\"x-*\"]";
    for text in [&inline, blocks] {
        let auth = Config::from_toml(text, "f").unwrap().auth;
        let [shop, b] = auth.tokens.as_slice() else { panic!("{auth:?}") };
        assert_eq!((&*shop.name, shop.token_file.to_str()), ("shop", Some("t")));
        assert_eq!((&*shop.scopes, &*shop.bots), (&[Scope::Publish][..], &["*".to_owned()][..]));
        assert_eq!(b.scopes, [Scope::Read, Scope::Operate]);
        assert_eq!(b.bots, ["x-*"]);
        assert_eq!((shop.max_weight, b.max_weight), (1_000, 1), "only operators raise weights");
    }
}

#[test]
fn a_bad_token_is_refused_with_its_line_and_key() {
    let block = |more: &str| format!("[[auth.tokens]]\n{}\n{more}", TOKEN.replace(", ", "\n"));
    let inline = |more: &str| format!("[auth]\ntokens = [{{ {TOKEN} }},\n {{ {more} }}]");
    let table = [
        (
            "auth.tokens = 1".to_owned(),
            r#"f.toml:1: auth.tokens must be a list of tables such as [{ name = "a" }], not a whole number"#,
        ),
        (
            "[auth]\ntokens = [\n\"x\"]".to_owned(),
            "f.toml:3: auth.tokens[0] must be a table, not a text",
        ),
        (
            block("scope = [\"read\"]"),
            r#"f.toml:5: unknown key "auth.tokens[0].scope"; did you mean "auth.tokens[0].scopes"?"#,
        ),
        (
            block("token = \"hidden\""),
            r#"f.toml:5: unknown key "auth.tokens[0].token"; `fairlane config` prints every key"#,
        ),
        (
            block("bots = \"x\""),
            r#"f.toml:5: auth.tokens[0].bots must be a list of texts such as ["a", "b"], not a text"#,
        ),
        (
            block("").replace("\"shop\"", "\"anonymous\""),
            r#"f.toml:2: auth.tokens[0].name is "anonymous", which the log calls callers without a token; choose another name"#,
        ),
        (
            block("max_weight = 1001"),
            "f.toml:5: auth.tokens[0].max_weight is 1001; write a whole number from 0 to 1000",
        ),
        (
            block("bots = []"),
            "f.toml:5: auth.tokens[0].bots is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]",
        ),
        (
            inline(r#"name = "b", token_file = "u", scopes = ["write"]"#),
            r#"f.toml:3: auth.tokens[1].scopes holds "write"; write "publish", "read", "operate" or "count""#,
        ),
        (
            inline(r#"name = "b", token_file = "u""#),
            r#"f.toml:3: auth.tokens[1].scopes is empty; name at least one of "publish", "read" and "operate", or "count" alone"#,
        ),
        (
            inline(r#"name = "b", scopes = ["read"]"#),
            "f.toml:3: auth.tokens[1].token_file is not set; name a file",
        ),
        (
            inline(r#"token_file = "u", scopes = ["read"]"#),
            "f.toml:3: auth.tokens[1].name holds an unusable name; each has 1 to 1024 bytes without control characters",
        ),
        (
            inline(r#"name = "shop", token_file = "u", scopes = ["read"]"#),
            "f.toml:3: auth.tokens[1].name is \"shop\" once more; give each its own",
        ),
        (
            format!("auth.allow_anonymous = true\nauth.tokens = [{{ {TOKEN} }}]"),
            "f.toml:1: auth.allow_anonymous is true beside auth.tokens, which are asked for all the same; set it to false or remove the tokens",
        ),
        (
            "\"auth.tokens[0]\".name = \"x\"".to_owned(),
            r#"f.toml:1: unknown key "auth.tokens[0]"; `fairlane config` prints every key"#,
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), message, "{text}");
    }
}

#[test]
fn tokens_are_in_files_only() {
    let variables = [("FAIRLANE__AUTH__TOKENS", "hidden")];
    let variables = variables.map(|(name, text)| (name.to_owned(), text.to_owned()));
    let error = Config::load_with(None, variables.into_iter()).unwrap_err().to_string();
    assert_eq!(
        error,
        "environment variable FAIRLANE__AUTH__TOKENS: auth.tokens is a list of tables, which only a file can hold; unset the variable"
    );
}

#[test]
fn listening_beyond_the_loopback_needs_tokens_or_an_explicit_setting() {
    for beyond in ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "[::ffff:10.0.0.1]:80"] {
        let listen = format!("[http]\nlisten = \"{beyond}\"\n");
        let said = refusal(&listen);
        for part in ["f.toml:2: http.listen", "auth.tokens", "auth.allow_anonymous = true"] {
            assert!(said.contains(part), "{said}");
        }
        Config::from_toml(&format!("{listen}[auth]\nallow_anonymous = true"), "f").unwrap();
        Config::from_toml(&format!("{listen}[auth]\ntokens = [{{ {TOKEN} }}]"), "f").unwrap();
    }
    for within in ["127.0.0.1:80", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
        Config::from_toml(&format!("http.listen = \"{within}\""), "f").unwrap();
    }
}

const COUNT: &str = r#"name = "page", token_file = "p", scopes = ["count"]"#;

#[test]
fn a_public_token_counts_for_named_bots_and_known_origins_and_can_do_nothing_else() {
    let with = |origins: &str, more: &str| {
        format!(
            "http.cors_origins = {origins}\n[[auth.tokens]]\n{}\n{more}",
            COUNT.replace(", ", "\n")
        )
    };
    let (sites, bots) =
        (r#"["https://a.example", "http://b.example:8080"]"#, "bots = [\"shop-*\"]");
    let token = Config::from_toml(&with(sites, bots), "f").unwrap().auth.tokens.remove(0);
    assert_eq!(token.scopes, [Scope::Count]);
    assert_eq!((token.rate, token.address_rate, token.origins.len()), (1_000, 20, 0));
    for (text, expected) in [
        (
            with(sites, bots).replace("[\"count\"]", "[\"count\", \"read\"]"),
            r#"auth.tokens[0].scopes holds "count" beside other scopes, but such a token is public; make another token for the others"#,
        ),
        (
            with(sites, ""),
            r#"auth.tokens[0].bots holds "*", but a token with the scope "count" is public; name the bots whose views it may count"#,
        ),
        (
            with("[]", bots),
            r#"auth.tokens[0].scopes holds "count", but http.cors_origins is empty; name the sites whose pages count there"#,
        ),
        (
            with(sites, &format!("{bots}\norigins = [\"https://c.example\"]")),
            r#"auth.tokens[0].origins holds "https://c.example", which http.cors_origins does not; add it there"#,
        ),
        (
            with(sites, &format!("{bots}\nrate = 0")),
            "auth.tokens[0].rate is 0; write a whole number from 1 to 1000000",
        ),
        (
            with(sites, bots).replace("\"count\"", "\"read\"")
                + "\norigins = [\"https://a.example\"]",
            r#"auth.tokens[0].origins is set, but only a token with the scope "count" is for certain origins; remove it"#,
        ),
    ] {
        let said = refusal(&text);
        assert!(said.ends_with(expected), "{said}\ninstead of\n{expected}");
    }
    for wrong in [
        "*",
        "null",
        "https://a.example/",
        "https://A.example",
        "a.example",
        "ftp://a.example",
        "https://a.example:443",
    ] {
        let said = refusal(&format!("http.cors_origins = [{wrong:?}]"));
        let expected = format!(
            "f.toml:1: http.cors_origins holds {wrong:?}; write scheme, host and port exactly as browsers send them"
        );
        assert!(said.starts_with(&expected), "{said}");
    }
}
