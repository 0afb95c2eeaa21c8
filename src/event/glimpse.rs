//! What the start of a queue record tells of its event, for lists that leave out the payload.

/// The id and type of an event, and the start of its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glimpse {
    /// The id.
    pub id: String,
    /// The type.
    pub kind: String,
    /// The start of the data, as JSON text; `None` without data.
    pub data: Option<String>,
}

impl Glimpse {
    /// Number of bytes at the start of a record that are enough: six attributes of the maximum
    /// length, and a thousand bytes of data.
    pub const BYTES: usize = 8 << 10;

    /// Reads the start of a record. `None`: it is damaged, of a newer version, or too short.
    #[must_use]
    pub fn read(start: &[u8]) -> Option<Self> {
        let mut rest = start.get(11..)?;
        let is_record = matches!(start, [0x93, super::RECORD_VERSION, 0xcf, ..]);
        // An array of eight elements: id, source, type, subject, time, expirytime, data, extensions.
        if !is_record || take(&mut rest, 1)? != [0x98] {
            return None;
        }
        let (id, _source, kind) = (text(&mut rest)?, text(&mut rest)?, text(&mut rest)?);
        for _ in ["subject", "time", "expirytime"] {
            if let Length::Bytes(bytes) = length(&mut rest)? {
                take(&mut rest, bytes)?;
            }
        }
        let data = match length(&mut rest)? {
            Length::Bytes(bytes) => {
                let start = &rest[..bytes.min(rest.len())];
                // The end may be in the middle of a character.
                let valid = start.utf8_chunks().next().map_or("", |chunk| chunk.valid());
                Some(valid.to_owned())
            }
            Length::Nil => None,
        };
        Some(Self { id, kind, data })
    }
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(bytes)?;
    *rest = left;
    Some(taken)
}

/// The length of the text that follows.
enum Length {
    Bytes(usize),
    Nil,
}

fn length(rest: &mut &[u8]) -> Option<Length> {
    let width = match *take(rest, 1)? {
        [0xc0] => return Some(Length::Nil),
        [short @ 0xa0..=0xbf] => return Some(Length::Bytes(usize::from(short & 0x1f))),
        [0xd9] => 1,
        [0xda] => 2,
        [0xdb] => 4,
        _ => return None,
    };
    let digits = take(rest, width)?.iter();
    Some(Length::Bytes(digits.fold(0, |length, digit| (length << 8) | usize::from(*digit))))
}

fn text(rest: &mut &[u8]) -> Option<String> {
    let Length::Bytes(bytes) = length(rest)? else { return None };
    String::from_utf8(take(rest, bytes)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::super::tests::record;
    use super::*;
    use crate::event::Event;
    use crate::id::BotId;

    fn event(id: &str, data: Option<&str>) -> Event {
        let bot = BotId::parse("shop").unwrap();
        let built = Event::builder("tag.applied", &bot).id(id).subject("ann");
        match data {
            Some(data) => built.data(&data).unwrap().build().unwrap(),
            None => built.build().unwrap(),
        }
    }

    #[test]
    fn the_start_of_a_record_is_enough() {
        for (id, data) in
            [("1", None), ("short", Some("x")), (&*"é".repeat(500), Some(&*"日".repeat(200_000)))]
        {
            let event = event(id, data);
            let record = record(7, &event);
            let start = &record[..record.len().min(Glimpse::BYTES)];
            let seen = Glimpse::read(start).unwrap();
            assert_eq!((&*seen.id, &*seen.kind), (id, "tag.applied"));
            match event.data() {
                None => assert_eq!(seen.data, None),
                Some(whole) => {
                    let start = seen.data.unwrap();
                    assert!(whole.starts_with(&start), "{start}");
                    assert!(start == whole || start.len() > 1_000, "{}", start.len());
                }
            }
        }
    }

    #[test]
    fn anything_else_has_no_glimpse() {
        let record = record(7, &event("1", Some("x")));
        for end in 0..record.len() - 20 {
            let _ = Glimpse::read(&record[..end]);
        }
        for bytes in [&b""[..], b"1", &record[..12], &[0x93, 99], &[0xff; 64]] {
            assert_eq!(Glimpse::read(bytes), None);
        }
    }
}
