//! The messages of Redis.

use super::Protocol;

/// The protocol of Redis: replies come in the order of the commands.
#[derive(Debug)]
pub struct Resp;

impl Protocol for Resp {
    fn frame(bytes: &[u8]) -> Option<usize> {
        frame(bytes)
    }

    fn number(_: &[u8], nth: u64) -> u64 {
        nth
    }

    fn streams(command: &[u8]) -> bool {
        const PSYNC: &[u8] = b"$5\r\nPSYNC\r\n";
        command.starts_with(b"*3\r\n") && command[4..].starts_with(PSYNC)
    }

    fn answers(reply: &[u8], nth: u64) -> Option<u64> {
        // A push answers no command.
        (reply[0] != b'>').then_some(nth)
    }
}

/// The length of the first complete RESP value, RESP 2 or 3. An inline command counts as a line.
fn frame(bytes: &[u8]) -> Option<usize> {
    let line = memchr::memmem::find(bytes, b"\r\n")? + 2;
    // Null is written as a count of -1, and no value follows its line.
    let count = || std::str::from_utf8(&bytes[1..line - 2]).ok()?.parse().ok();
    let values: usize = match bytes[0] {
        b'$' | b'!' | b'=' => {
            let length = count().map_or(line, |length: usize| line + length + 2);
            return (length <= bytes.len()).then_some(length);
        }
        b'*' | b'~' | b'>' => count().unwrap_or(0),
        b'%' => 2 * count().unwrap_or(0),
        // An attribute precedes the value that it describes.
        b'|' => 2 * count().unwrap_or(0) + 1,
        _ => 0,
    };
    (0..values).try_fold(line, |at, _| Some(at + frame(&bytes[at..])?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_found_once_it_is_whole() {
        let frames: [&[u8]; 9] = [
            b"+OK\r\n",
            b"$-1\r\n",
            b"$3\r\na\r\n\r\n",
            b"*-1\r\n",
            b"*2\r\n$1\r\na\r\n*1\r\n:5\r\n",
            b"%1\r\n+a\r\n_\r\n",
            b">2\r\n+message\r\n+x\r\n",
            b"|1\r\n+ttl\r\n:1\r\n$1\r\na\r\n",
            b"PING\r\n",
        ];
        for whole in frames {
            let shown = String::from_utf8_lossy(whole);
            assert_eq!(frame(whole), Some(whole.len()), "{shown:?}");
            assert_eq!(frame(&[whole, b"+next\r\n"].concat()), Some(whole.len()), "{shown:?}");
            for cut in 0..whole.len() {
                assert_eq!(frame(&whole[..cut]), None, "{shown:?} cut at {cut}");
            }
        }
    }
}
