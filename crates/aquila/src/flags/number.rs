//! Numbers on the command line, refused there if they are out of range.

/// A whole number from `least` to `most`.
pub fn whole(
    least: usize,
    most: usize,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("expected a whole number from {least} to {most}")),
    }
}

/// A seed; negative ones are as good as any.
pub fn seed(text: &str) -> Result<u64, String> {
    let negative = |_| text.parse::<i64>().map(|n| n as u64);
    text.parse().or_else(negative).map_err(|_| "expected a whole number of 64 bits".into())
}
