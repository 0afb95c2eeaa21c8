//! `[quotas]`: the list of bots, and the exact messages.

use super::refusal;
use crate::config::Config;
use crate::id::BotId;
use crate::quotas::Quota;

#[test]
fn a_bot_has_the_general_quotas_except_for_those_of_its_own() {
    let text =
        "[quotas]\nqueued_bytes = 5000\nbots = [{ bot = \"b\", dead_letters = 7, dead_bytes = 0 }]";
    let quotas = Config::from_toml(text, "f").unwrap().quotas.quotas();
    let [b, c] = ["b", "c"].map(|bot| BotId::parse(bot).unwrap());
    let general = quotas.of(&c);
    assert_eq!((general.queued_bytes, general.pending), (5_000, 100_000));
    assert_eq!(quotas.of(&b), Quota { dead_letters: 7, dead_bytes: 0, ..general });
}

#[test]
fn wrong_quotas_are_refused_with_their_line_and_key() {
    for (text, expected) in [
        (
            "[quotas]\nqueued_bytes = -1",
            "f.toml:2: quotas.queued_bytes is -1; write a whole number from 0 to 1000000000000",
        ),
        (
            "[quotas]\nmemory_guard = 1.5",
            "f.toml:2: quotas.memory_guard is 1.5; write a fraction from 0.1 to 1.0",
        ),
        (
            "[[quotas.bots]]\nbot = \"b\"\n[[quotas.bots]]\nbot = \"b\"",
            "f.toml:4: quotas.bots[1].bot is \"b\" once more; give each bot one table",
        ),
        (
            "quotas.bots = [{ bot = \"b\", dead_letters = -2 }]",
            "f.toml:1: quotas.bots[0].dead_letters is -2; write a whole number from 0 to 1000000000000",
        ),
    ] {
        assert_eq!(refusal(text), expected);
    }
}
