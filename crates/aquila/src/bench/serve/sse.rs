//! Server-sent events, out of the bytes of a response.

/// The most bytes of one event; a longer one is no event of such an API.
const MOST_BYTES: usize = 16 << 20;

/// Bytes that come in, and the data of the events in them.
#[derive(Debug, Default)]
pub struct Events {
    /// What has come and is not read yet.
    bytes: Vec<u8>,
    /// Where in `bytes` the next line begins.
    at: usize,
    /// The data of the event that is being read.
    data: Option<Vec<u8>>,
    /// Whether the last line ended in a carriage return, to which a line feed may belong.
    after_return: bool,
}

impl Events {
    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The data of the next event that is complete; events without data are none.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            if std::mem::take(&mut self.after_return) {
                match self.bytes.get(self.at) {
                    Some(b'\n') => self.at += 1,
                    Some(_) => (),
                    None => {
                        self.after_return = true;
                        return Ok(None);
                    }
                }
            }
            let rest = &self.bytes[self.at..];
            let Some(length) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                let size = rest.len() + self.data.as_ref().map_or(0, Vec::len);
                if size > MOST_BYTES {
                    return Err(format!("an event has more than {MOST_BYTES} bytes"));
                }
                return Ok(None);
            };
            let (line, end) = (&rest[..length], rest[length]);
            self.at += length + 1;
            self.after_return = end == b'\r';
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    return Ok(Some(data));
                }
                continue;
            }
            // Other fields and comments, which keep connections alive, carry nothing here.
            let Some(value) = line.strip_prefix(b"data:") else { continue };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
                None => self.data = Some(value.to_vec()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let (mut events, mut read) = (Events::default(), Vec::new());
        for piece in pieces {
            events.push(piece);
            while let Some(data) = events.next().unwrap() {
                read.push(String::from_utf8(data).unwrap());
            }
        }
        read
    }

    #[test]
    fn events_are_read_wherever_the_bytes_are_cut() {
        // The stream of examples in the HTML standard, with each of the ends that a line may have.
        for end in ["\n", "\r\n", "\r"] {
            let text = ": a comment\n\ndata: {\"é\": 1}\nid: 7\n\nevent: x\ndata:a\ndata:  b\n\ndata\n\ndata: cut";
            let bytes = text.replace('\n', end).into_bytes();
            let expected = ["{\"é\": 1}", "a\n b"];
            assert_eq!(read(&[&bytes]), expected, "{end:?}");
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(read(&single), expected, "{end:?}");
        }
    }

    #[test]
    fn an_event_without_an_end_is_given_up() {
        let mut events = Events::default();
        let mut failed = false;
        for _ in 0..17 {
            events.push(&vec![b'x'; 1 << 20]);
            failed |= events.next().is_err();
        }
        assert!(failed);
    }
}
