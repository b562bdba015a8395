//! The directory of a zip file whose members are stored as they are, which is how torch writes.
//!
//! The invariant: a member's range lies within the file, and no number of the file is believed
//! before that; the directory is as long as the bytes that hold it.

use std::collections::BTreeMap;
use std::ops::Range;

/// The members of a file: their names and where their bytes are. What is wrong is said in words.
pub(super) fn members(file: &[u8]) -> Result<BTreeMap<String, Range<usize>>, String> {
    let directory = directory(file)?;
    let mut members = BTreeMap::new();
    let mut at = directory.start;
    while at < directory.end {
        let entry = Entry::read(file, at, directory.end)?;
        let range = entry.data(file)?;
        at = entry.next;
        if members.insert(entry.name.clone(), range).is_some() {
            return Err(format!("has two members called {:?}", entry.name));
        }
    }
    Ok(members)
}

/// The smallest end record, and the longest comment behind it.
const END: usize = 22;
const LONGEST_COMMENT: usize = 65_535;

/// Where the entries of the directory are.
fn directory(file: &[u8]) -> Result<Range<usize>, String> {
    let damaged = || "is truncated or no zip file: it has no directory at its end".to_owned();
    let last = file.len().checked_sub(END).ok_or_else(damaged)?;
    let first = last.saturating_sub(LONGEST_COMMENT);
    let is_end = |&at: &usize| file[at..].starts_with(b"PK\x05\x06");
    let end = (first..=last).rev().find(is_end).ok_or_else(damaged)?;
    let (mut size, mut start) =
        (u64::from(u32_at(file, end + 12)?), u64::from(u32_at(file, end + 16)?));
    // Large files keep their numbers in a second record, which a locator before the end points at.
    let locator = end.checked_sub(20).filter(|&at| file[at..].starts_with(b"PK\x06\x07"));
    if let Some(locator) = locator {
        let record = usize::try_from(u64_at(file, locator + 8)?).map_err(|_| damaged())?;
        if !file.get(record..).is_some_and(|rest| rest.starts_with(b"PK\x06\x06")) {
            return Err("has a directory whose second record is not where it says".into());
        }
        let second = |field: usize| record.checked_add(field).ok_or_else(damaged);
        size = u64_at(file, second(40)?)?;
        start = u64_at(file, second(48)?)?;
    }
    let outside = || format!("is truncated: its directory of {size} bytes begins at {start}");
    let start_at = usize::try_from(start).map_err(|_| outside())?;
    let size_at = usize::try_from(size).map_err(|_| outside())?;
    let stop = start_at.checked_add(size_at).filter(|&stop| stop <= end).ok_or_else(outside)?;
    Ok(start_at..stop)
}

/// One entry of the directory.
struct Entry {
    name: String,
    size: u64,
    header: u64,
    next: usize,
}

impl Entry {
    fn read(file: &[u8], at: usize, end: usize) -> Result<Self, String> {
        let damaged = || format!("has a directory that is damaged at byte {at}");
        let entry = file.get(at..end).ok_or_else(damaged)?;
        if !entry.starts_with(b"PK\x01\x02") || entry.len() < 46 {
            return Err(damaged());
        }
        let lengths = [u16_at(entry, 28)?, u16_at(entry, 30)?, u16_at(entry, 32)?];
        let [name_length, extra_length, comment_length] = lengths.map(usize::from);
        let extra_at = 46 + name_length;
        let name = entry.get(46..extra_at).ok_or_else(damaged)?;
        let extra = entry.get(extra_at..extra_at + extra_length).ok_or_else(damaged)?;
        let name = std::str::from_utf8(name).map_err(|_| damaged())?.to_owned();
        if u16_at(entry, 8)? & 1 != 0 {
            return Err(format!("member {name} is encrypted"));
        }
        let method = u16_at(entry, 10)?;
        if method != 0 {
            return Err(format!(
                "member {name} is compressed (method {method}), and torch.save stores members as \
                 they are; save it again with torch"
            ));
        }
        let (packed, whole) = (u32_at(entry, 20)?, u32_at(entry, 24)?);
        let header = u32_at(entry, 42)?;
        let mut wide = wide_numbers(extra);
        let mut number = |narrow: u32| match narrow {
            u32::MAX => wide.next().ok_or_else(damaged),
            narrow => Ok(u64::from(narrow)),
        };
        // The order of the wide numbers is that of these three fields.
        let whole = number(whole)?;
        let packed = number(packed)?;
        let header = number(header)?;
        if packed != whole {
            return Err(format!("member {name} is said to have both {packed} and {whole} bytes"));
        }
        let next = at + extra_at + extra_length + comment_length;
        Ok(Self { name, size: whole, header, next })
    }

    /// Where the bytes are: behind a header of their own.
    fn data(&self, file: &[u8]) -> Result<Range<usize>, String> {
        let outside = || format!("is truncated: member {} is not within it", self.name);
        let header = usize::try_from(self.header).map_err(|_| outside())?;
        let local = file.get(header..).ok_or_else(outside)?;
        if !local.starts_with(b"PK\x03\x04") || local.len() < 30 {
            return Err(format!("member {} is not where the directory says", self.name));
        }
        let lengths = usize::from(u16_at(local, 26)?) + usize::from(u16_at(local, 28)?);
        let start = header + 30 + lengths;
        let size = usize::try_from(self.size).map_err(|_| outside())?;
        let end = start.checked_add(size).filter(|&end| end <= file.len()).ok_or_else(outside)?;
        Ok(start..end)
    }
}

/// The numbers of the field that entries of large files have.
fn wide_numbers(extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut rest = extra;
    let mut found: &[u8] = &[];
    while let (Ok(kind), Ok(length)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let Some(field) = rest.get(4..4 + usize::from(length)) else { break };
        if kind == 1 {
            found = field;
            break;
        }
        rest = &rest[4 + usize::from(length)..];
    }
    found.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

fn bytes_at<const N: usize>(file: &[u8], at: usize) -> Result<[u8; N], String> {
    let found = file.get(at..).and_then(|rest| rest.first_chunk::<N>());
    found.copied().ok_or_else(|| format!("is truncated at byte {at}"))
}

fn u16_at(file: &[u8], at: usize) -> Result<u16, String> {
    bytes_at(file, at).map(u16::from_le_bytes)
}

fn u32_at(file: &[u8], at: usize) -> Result<u32, String> {
    bytes_at(file, at).map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize) -> Result<u64, String> {
    bytes_at(file, at).map(u64::from_le_bytes)
}
