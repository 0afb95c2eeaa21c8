//! Changes inputs at random, the same way in every run.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// Numbers at the bounds of types and of Fairlane.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "1e400",
    "-0.0",
];
const BYTES: [u8; 12] = [0, 1, 9, 10, 32, 127, 128, 0xc0, 0xdf, 0xe2, 0xf0, 0xff];

/// Makes inputs from others.
pub(super) struct Mutator {
    random: SmallRng,
    inputs: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
}

impl Mutator {
    /// `dictionary`: words in the form that libFuzzer reads, `"text"` in each line.
    pub(super) fn new(seed: &str, inputs: Vec<Vec<u8>>, dictionary: &str) -> Self {
        let seed = seed.bytes().fold(1, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
        let words = dictionary.lines().filter_map(word).collect();
        Self { random: SmallRng::seed_from_u64(seed), inputs, words }
    }

    /// One of the inputs with one to eight changes.
    pub(super) fn next_input(&mut self, max: usize) -> Vec<u8> {
        let mut input = self.any_input();
        for _ in 0..self.random.random_range(1..=8) {
            self.change(&mut input);
        }
        input.truncate(max);
        input
    }

    fn any_input(&mut self) -> Vec<u8> {
        let at = self.random.random_range(0..self.inputs.len());
        self.inputs[at].clone()
    }

    /// A random part of an input of this length.
    fn part(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.random.random_range(0..=length);
        let end = (start + self.random.random_range(0..=16)).min(length);
        start..end
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let part = self.part(input.len());
        let insert = match self.random.random_range(0..9) {
            0 => {
                if let Some(byte) = input.get_mut(part.start) {
                    *byte ^= 1 << self.random.random_range(0..8);
                }
                return;
            }
            1 => {
                let byte = BYTES[self.random.random_range(0..BYTES.len())];
                if let Some(changed) = input.get_mut(part.start) {
                    *changed = byte;
                }
                return;
            }
            2 => Vec::new(),
            3 => {
                let copy = input[part.clone()].to_vec();
                let times = self.random.random_range(1..=40);
                input.splice(part.end..part.end, copy.repeat(times));
                return;
            }
            4 => vec![self.random.random()],
            5 => {
                let other = self.any_input();
                let from = self.random.random_range(0..=other.len());
                other[from..].to_vec()
            }
            6 => NUMBERS[self.random.random_range(0..NUMBERS.len())].into(),
            _ if self.words.is_empty() => vec![b' '],
            _ => self.words[self.random.random_range(0..self.words.len())].clone(),
        };
        input.splice(part, insert);
    }
}

/// The bytes of `"text"`, with `\xAB`, `\"` and `\\` in it. `None` for other lines.
fn word(line: &str) -> Option<Vec<u8>> {
    let inner = line.split_once('"')?.1.strip_suffix('"')?;
    let mut word = Vec::new();
    let mut rest = inner.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let (byte, left) = match (first, after) {
            (b'\\', [b'x', high, low, after @ ..]) => {
                let digits = [*high, *low];
                let digits = std::str::from_utf8(&digits).ok()?;
                (u8::from_str_radix(digits, 16).ok()?, after)
            }
            (b'\\', [escaped, after @ ..]) => (*escaped, after),
            _ => (first, after),
        };
        word.push(byte);
        rest = left;
    }
    Some(word)
}

#[test]
fn the_changes_are_the_same_in_every_run_and_differ_from_each_other() {
    let inputs = || vec![b"one input".to_vec(), b"{\"another\": 1}".to_vec()];
    let dictionary = "# words\n\"null\"\nquote=\"\\\"\\x00\"\n";
    let mut one = Mutator::new("a", inputs(), dictionary);
    let mut same = Mutator::new("a", inputs(), dictionary);
    let mut other = Mutator::new("b", inputs(), dictionary);
    assert_eq!(one.words, [b"null".to_vec(), b"\"\0".to_vec()]);
    let take = |from: &mut Mutator| (0..500).map(|_| from.next_input(64)).collect::<Vec<_>>();
    let (first, again, apart) = (take(&mut one), take(&mut same), take(&mut other));
    assert_eq!(first, again);
    assert_ne!(first, apart);
    let different: std::collections::BTreeSet<_> = first.iter().collect();
    assert!(different.len() > 400 && first.iter().all(|input| input.len() <= 64));
}
