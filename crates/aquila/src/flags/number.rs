//! Numbers on the command line, refused there if they are out of range.

/// A whole number from `least` to `most`.
pub fn whole<T: TryFrom<u64>>(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    }
}

/// A seed; negative ones are as good as any.
pub fn seed(text: &str) -> Result<u64, String> {
    let negative = |_| text.parse::<i64>().map(|n| n as u64);
    text.parse().or_else(negative).map_err(|_| "expected a whole number of 64 bits".into())
}
