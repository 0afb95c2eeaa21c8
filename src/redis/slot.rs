//! The slot of a key in a cluster.

/// Number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    crc16(hash_tag(key)) % SLOTS
}

/// The part between the first `{` and the next `}`, if not empty; otherwise the whole key.
fn hash_tag(key: &[u8]) -> &[u8] {
    let position = |bytes: &[u8], wanted: u8| bytes.iter().position(|&byte| byte == wanted);
    let tag = position(key, b'{').and_then(|open| {
        let rest = &key[open + 1..];
        position(rest, b'}').map(|close| &rest[..close])
    });
    tag.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        let index = usize::from((crc >> 8) as u8 ^ byte);
        (crc << 8) ^ CRC_TABLE[index]
    })
}

const CRC_TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The first is the check value of CRC-16/XMODEM; the others are the answers of `CLUSTER
    /// KEYSLOT`.
    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        let cases: [(&str, u16); 10] = [
            ("foo", 12_182),
            ("somekey", 11_058),
            ("foo{hash_tag}", 2_515),
            ("bar{hash_tag}", 2_515),
            ("hash_tag", 2_515),
            ("", 0),
            ("{}", 15_257),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ];
        for (key, slot) in cases {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn a_hash_tag_is_the_first_that_is_not_empty_else_there_is_none() {
        let cases = [
            ("fl:{p:3}:q:a", "p:3"),
            ("fl:{p:3}:q:{b}", "p:3"),
            ("{}", "{}"),
            ("{}{a}", "{}{a}"),
            ("a}b{c", "a}b{c"),
            ("{{a}}", "{a"),
            ("plain", "plain"),
        ];
        for (key, tag) in cases {
            assert_eq!(hash_tag(key.as_bytes()), tag.as_bytes(), "{key}");
        }
    }
}
