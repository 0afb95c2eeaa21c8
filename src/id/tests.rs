//! Tests of ids and their bounds.

use super::*;

#[test]
fn hostile_bot_ids_are_either_kept_whole_or_refused_with_a_reason() {
    for legal in ["*", "{}", "a b", "|||", "fl:{x:1}:ctl", "日本", "'; --", "a/../b", "%00"] {
        assert_eq!(BotId::parse(legal).unwrap().as_str(), legal);
    }
    let refused = [
        ("", "bot id is empty"),
        ("a\0b", "bot id holds '\\0' at byte 1; control characters are not allowed"),
        ("a\n", "bot id holds '\\n' at byte 1; control characters are not allowed"),
        (&"x".repeat(257), "bot id has 257 bytes; at most 256 are allowed"),
    ];
    for (text, why) in refused {
        assert_eq!(BotId::parse(text).unwrap_err().to_string(), why);
    }
}

#[test]
fn pipeline_names_are_plain_words() {
    for legal in ["log", "a", "x-1_y", "0"] {
        assert!(PipelineName::parse(legal).is_ok(), "{legal}");
    }
    for refused in ["", "-a", "A", "a b", "a:b", "{a}", "é", &"a".repeat(65)] {
        assert!(PipelineName::parse(refused).is_err(), "{refused}");
    }
}

#[test]
fn the_id_of_a_dead_letter_is_read_back_and_others_are_refused() {
    let id: LetterId = "15.1700000000000-3".parse().unwrap();
    assert_eq!(id.to_string(), "15.1700000000000-3");
    assert_eq!((id.shard.index(), id.entry.seq), (15, 3));
    for refused in ["", "7", "1700000000000-0", "1024.1-0", "-1.1-0", "1.1", "1.1-", "a.1-0"] {
        assert!(refused.parse::<LetterId>().is_err(), "{refused}");
    }
}

#[test]
fn every_bot_has_one_shard_below_the_count() {
    let shards = ShardCount::new(16).unwrap();
    let mut met = [0_u32; 16];
    for n in 0..16_000 {
        met[BotId::parse(&format!("bot-{n}")).unwrap().shard(shards).index()] += 1;
    }
    assert!(met.iter().all(|&bots| (800..1_200).contains(&bots)), "{met:?}");
}
