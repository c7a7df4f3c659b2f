//! The ratios as a picture: one bar for each figure, as an SVG of its own.

use std::fmt::Write;

use crate::report::Report;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 190.0;
const BAR_WIDTH_MAX: f64 = 300.0;
const TOP: f64 = 96.0;
const ROW: f64 = 30.0;
const BAR: f64 = 18.0;
const WORSE: &str = "#c0504d";
const BETTER: &str = "#2f6f9f";

/// Draws a report.
#[must_use]
pub(crate) fn draw(report: &Report) -> String {
    let lines = report.lines();
    let height = TOP + ROW * lines.len() as f64 + 34.0;
    // The bars are as long as the logarithm of the ratio: 2x and 1/2x are as far from the middle.
    let logs: Vec<f64> = lines.iter().map(|line| logarithm(line.ratio)).collect();
    let (worst, best) = logs.iter().fold((0.0, 1.0), |(low, high): (f64, f64), log| (low.min(*log), high.max(*log)));
    let scale = BAR_WIDTH_MAX / (best - worst);
    let zero = LEFT - worst * scale;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, 16.0, 26.0, "start", "kvrouted's index beside its peer's (to the right: kvrouted is better)");
    for (at, sentence) in report.config.sentence().lines().enumerate() {
        let y = 46.0 + 16.0 * at as f64;
        let _ = writeln!(svg, "<g font-size=\"11\" fill=\"#555\">");
        text(&mut svg, 16.0, y, "start", sentence);
        let _ = writeln!(svg, "</g>");
    }
    for (at, (line, log)) in lines.iter().zip(&logs).enumerate() {
        let y = TOP + ROW * at as f64;
        let length = log * scale;
        let (x, colour) = if length < 0.0 { (zero + length, WORSE) } else { (zero, BETTER) };
        let width = length.abs().max(1.0);
        let _ =
            writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>");
        text(&mut svg, LEFT - 10.0, y + 13.0, "end", line.name);
        let figures = format!("{:.1}x   {} / {}", line.ratio, line.kvrouted, line.peer);
        text(&mut svg, LEFT + BAR_WIDTH_MAX + 10.0, y + 13.0, "start", &figures);
    }
    text(&mut svg, LEFT + BAR_WIDTH_MAX + 10.0, height - 12.0, "start", "ratio   kvrouted / peer");
    svg.push_str("</svg>\n");
    svg
}

/// To the base of 2; 0 where there is none.
fn logarithm(ratio: f64) -> f64 {
    if ratio.is_finite() && ratio > 0.0 { ratio.log2() } else { 0.0 }
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}
