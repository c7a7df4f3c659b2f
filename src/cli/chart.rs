//! Bars for a terminal.

/// Cells of the longest bar.
const BAR_CELLS_MAX: usize = 40;
/// Parts of a cell, from an eighth to seven.
const PARTS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// A bar of `value` where `most` is the longest; nothing where there is nothing to show.
pub(super) fn bar(value: f64, most: f64) -> String {
    if !(value > 0.0 && most > 0.0) {
        return String::new();
    }
    let eighths = ((value / most).min(1.0) * (BAR_CELLS_MAX * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.extend(eighths.checked_rem(8).and_then(|part| PARTS.get(part.checked_sub(1)?)));
    bar
}

/// A line for each value: its name, its bar and its value.
pub(super) fn bars(lines: &[(String, f64, String)]) -> String {
    let most = lines.iter().map(|(_, value, _)| *value).fold(0.0, f64::max);
    let width = lines.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let line = |(name, value, told): &(String, f64, String)| format!("{name:width$} {} {told}", bar(*value, most));
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_is_the_most_and_the_others_are_in_proportion() {
        assert_eq!(bar(8.0, 8.0).chars().count(), BAR_CELLS_MAX);
        assert_eq!((bar(4.0, 8.0).chars().count(), bar(0.0, 8.0), bar(1.0, 0.0)), (20, String::new(), String::new()));
        assert_eq!(bar(1.0, 320.0), "▏");
        assert_eq!(bar(f64::NAN, 1.0), "");
        let text = bars(&[("a".into(), 1.0, "one".into()), ("long".into(), 2.0, "two".into())]);
        assert_eq!(text.lines().next(), Some(format!("a    {} one", "█".repeat(20)).as_str()));
    }
}
