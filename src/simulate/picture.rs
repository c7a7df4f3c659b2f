//! Curves over load as a self-contained SVG, and an HTML page with the picture and the table.

use std::fmt::Write as _;

use super::measure::Measured;
use super::report::{Row, escaped, html_table};

/// The line of one policy in a panel.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The policy's name.
    pub policy: String,
    /// Loads and values, by load.
    pub points: Vec<(f64, f64)>,
}

/// A small chart of one figure over load.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// What it shows, with the unit.
    pub title: String,
    /// What the loads are, with the unit.
    pub load: String,
    /// Whether the logarithm of the values is drawn; values must then be above 0.
    pub is_logarithmic: bool,
    /// The lines.
    pub curves: Vec<Curve>,
}

/// The panels of some policies' figures over load. `load` is what loads are, with the unit.
#[must_use]
pub fn panels(load: &str, policies: &[(String, Vec<(f64, Measured)>)]) -> Vec<Panel> {
    let panel = |title: &str, is_logarithmic: bool, of: fn(&Measured) -> f64| {
        let curve = |(policy, runs): &(String, Vec<(f64, Measured)>)| Curve {
            policy: policy.clone(),
            points: runs.iter().map(|(load, run)| (*load, of(run))).collect(),
        };
        let curves = policies.iter().map(curve).collect();
        Panel { title: title.into(), load: load.into(), is_logarithmic, curves }
    };
    vec![
        panel("mean TTFT, s", true, |run| run.ttft_s.mean),
        panel("TPOT p99, ms", true, |run| run.tpot_s.p99 * 1e3),
        panel("mean E2E, s", true, |run| run.e2e_s.mean),
        panel("goodput, share that meets the SLO", false, |run| run.goodput),
    ]
}

const WIDTH: f64 = 320.0;
const HEIGHT: f64 = 200.0;
const MARGIN: (f64, f64, f64, f64) = (30.0, 12.0, 34.0, 46.0);
const COLUMNS: usize = 2;
const LEGEND_COLUMNS: usize = 4;
const LEGEND_LINE: f64 = 18.0;
/// Colours of the other policies' lines. Dashes tell the lines apart too.
const HUES: [u16; 6] = [210, 150, 30, 280, 340, 90];
const DASHES: [&str; 3] = ["", "6 3", "2 3"];

const STYLE: &str = "svg{background:#fff;color:#1b1f24;font:11px system-ui,sans-serif}\
text{fill:currentColor}.t{font-weight:600;font-size:12px}.s{opacity:.75}\
.g{stroke:currentColor;stroke-opacity:.15}.c{fill:none;stroke-width:1.3}\
.ours{stroke:#d1242f;stroke-width:3;stroke-dasharray:none}\
@media(prefers-color-scheme:dark){svg{background:#0d1117;color:#e6edf3}.c{filter:brightness(1.35)}\
.ours{stroke:#ff7b72}}";

/// The picture: the panels two abreast, with one legend. The line of `ours` is emphasised.
#[must_use]
pub fn svg(title: &str, panels: &[Panel], ours: &str) -> String {
    let mut policies: Vec<&str> = Vec::new();
    for curve in panels.iter().flat_map(|panel| &panel.curves) {
        if !policies.contains(&curve.policy.as_str()) {
            policies.push(&curve.policy);
        }
    }
    let legend_lines = policies.len().div_ceil(LEGEND_COLUMNS) as f64;
    let top = 34.0 + legend_lines * LEGEND_LINE;
    let (width, height) = (WIDTH * COLUMNS as f64, top + HEIGHT * panels.len().div_ceil(COLUMNS) as f64);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\"><title>{0}</title><style>{STYLE}</style>\
         <text class=\"t\" x=\"12\" y=\"20\">{0}</text>\n",
        escaped(title)
    );
    for (at, policy) in policies.iter().enumerate() {
        let x = 12.0 + (at % LEGEND_COLUMNS) as f64 * (width - 24.0) / LEGEND_COLUMNS as f64;
        let y = 38.0 + (at / LEGEND_COLUMNS) as f64 * LEGEND_LINE;
        let line = pen(at, policy, ours);
        let _ = writeln!(
            out,
            "<path {line} d=\"M{x:.0} {y:.0}h22\"/><text x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            x + 27.0,
            y + 4.0,
            escaped(policy)
        );
    }
    for (at, panel) in panels.iter().enumerate() {
        let (x, y) = ((at % COLUMNS) as f64 * WIDTH, top + (at / COLUMNS) as f64 * HEIGHT);
        let _ = writeln!(out, "<g transform=\"translate({x} {y})\">");
        draw(&mut out, panel, &policies, ours);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// The attributes of a policy's line.
fn pen(at: usize, policy: &str, ours: &str) -> String {
    if policy == ours {
        return "class=\"c ours\"".into();
    }
    let (hue, dash) = (HUES[at % HUES.len()], DASHES[at / HUES.len() % DASHES.len()]);
    format!("class=\"c\" stroke=\"hsl({hue} 55% 45%)\" stroke-dasharray=\"{dash}\"")
}

/// A scale from values to places.
struct Scale {
    from: f64,
    to: f64,
    is_logarithmic: bool,
}

impl Scale {
    fn of(values: impl Iterator<Item = f64> + Clone, is_logarithmic: bool) -> Self {
        let (from, to) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let pad = if from == to { 0.5 * from.abs().max(1.0) } else { 0.0 };
        if is_logarithmic {
            Self { from, to: to * if pad > 0.0 { 2.0 } else { 1.0 }, is_logarithmic }
        } else {
            Self { from: from - pad, to: to + pad, is_logarithmic }
        }
    }

    /// From 0 to 1.
    fn place(&self, value: f64) -> f64 {
        if self.is_logarithmic {
            (value / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        }
    }

    /// Round values across the scale: about `count` of them.
    fn ticks(&self, count: f64) -> Vec<f64> {
        if self.is_logarithmic {
            let decades = (self.to / self.from).log10();
            let of_decade: &[f64] = if decades > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let powers = self.from.log10().floor() as i32..=self.to.log10().ceil() as i32;
            let all = powers.flat_map(|power| of_decade.iter().map(move |digit| digit * 10_f64.powi(power)));
            return all.filter(|tick| (self.from..=self.to).contains(tick)).collect();
        }
        let rough = (self.to - self.from) / count;
        let unit = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * unit).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let (first, last) = ((self.from / step).ceil() as i64, (self.to / step + 1e-9).floor() as i64);
        (first..=last).map(|at| at as f64 * step).collect()
    }
}

fn draw(out: &mut String, panel: &Panel, policies: &[&str], ours: &str) {
    let (top, right, bottom, left) = MARGIN;
    let (width, height) = (WIDTH - left - right, HEIGHT - top - bottom);
    let drawable =
        |point: &&(f64, f64)| point.0.is_finite() && point.1.is_finite() && (!panel.is_logarithmic || point.1 > 0.0);
    let points = || panel.curves.iter().flat_map(|curve| &curve.points).filter(drawable);
    let _ = writeln!(out, "<text class=\"t\" x=\"{left}\" y=\"18\">{}</text>", escaped(&panel.title));
    if points().next().is_none() {
        let _ = writeln!(out, "<text class=\"s\" x=\"{left}\" y=\"{}\">not measured</text>", top + height / 2.0);
        return;
    }
    let across = Scale::of(points().map(|point| point.0), false);
    let up = Scale::of(points().map(|point| point.1), panel.is_logarithmic);
    let x = |load: f64| left + across.place(load) * width;
    let y = |value: f64| top + (1.0 - up.place(value)) * height;
    for tick in up.ticks(4.0) {
        let at = y(tick);
        let _ = writeln!(
            out,
            "<path class=\"g\" d=\"M{left} {at:.1}h{width}\"/>\
             <text class=\"s\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
            left - 5.0,
            at + 4.0,
            number(tick)
        );
    }
    for tick in across.ticks(5.0) {
        let (at, below) = (x(tick), top + height);
        let _ = writeln!(
            out,
            "<path class=\"g\" d=\"M{at:.1} {top}v{height}\"/>\
             <text class=\"s\" text-anchor=\"middle\" x=\"{at:.1}\" y=\"{}\">{}</text>",
            below + 14.0,
            number(tick)
        );
    }
    let middle = left + width / 2.0;
    let _ = writeln!(
        out,
        "<text class=\"s\" text-anchor=\"middle\" x=\"{middle}\" y=\"{}\">{}</text>",
        HEIGHT - 5.0,
        escaped(&panel.load)
    );
    // Ours is drawn last, above the others.
    let mut curves: Vec<&Curve> = panel.curves.iter().collect();
    curves.sort_by_key(|curve| curve.policy == ours);
    for curve in curves {
        let at = policies.iter().position(|policy| *policy == curve.policy).unwrap_or(0);
        let path: Vec<String> = curve
            .points
            .iter()
            .filter(drawable)
            .map(|(load, value)| format!("{:.1} {:.1}", x(*load), y(*value)))
            .collect();
        let _ = writeln!(out, "<path {} d=\"M{}\"/>", pen(at, &curve.policy, ours), path.join("L"));
    }
}

/// A number as short as its size allows.
fn number(value: f64) -> String {
    let text = if value.abs() >= 10.0 || value == 0.0 { format!("{value:.0}") } else { format!("{value:.3}") };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// A part of a page.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// What was run, in a sentence or two.
    pub text: String,
    /// The curves; may be empty.
    pub panels: Vec<Panel>,
    /// The table; may be empty.
    pub rows: Vec<Row>,
}

/// A page with the pictures and tables of some sections. It loads nothing from elsewhere.
#[must_use]
pub fn html(title: &str, sections: &[Section], ours: &str) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>\
         :root{{color-scheme:light dark}}body{{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;\
         padding:0 1rem}}table{{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}}\
         th,td{{padding:.2rem .5rem;text-align:right;border-bottom:1px solid #8884}}\
         th:first-child,td:first-child{{text-align:left}}tr.ours{{font-weight:600}}pre{{white-space:pre-wrap}}\
         svg{{max-width:100%;height:auto}}</style></head><body><h1>{0}</h1>\n",
        escaped(title)
    );
    for section in sections {
        let _ = writeln!(out, "<h2>{}</h2><pre>{}</pre>", escaped(&section.title), escaped(&section.text));
        if !section.panels.is_empty() {
            out.push_str(&svg(&section.title, &section.panels, ours));
        }
        if !section.rows.is_empty() {
            out.push_str(&html_table(&section.rows, ours));
        }
    }
    out.push_str("</body></html>\n");
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn panel(values: &[f64], is_logarithmic: bool) -> Panel {
        let points: Vec<(f64, f64)> = values.iter().enumerate().map(|(at, value)| (at as f64, *value)).collect();
        let curve = |policy: &str| Curve { policy: policy.into(), points: points.clone() };
        Panel {
            title: "a<b, s".into(),
            load: "rate, 1/s".into(),
            is_logarithmic,
            curves: vec![curve("latency"), curve("kv")],
        }
    }

    #[test]
    fn the_picture_has_a_line_for_each_policy_and_emphasises_ours() {
        let svg = svg("Curves", &[panel(&[1.0, 2.0, 9.0], false)], "latency");
        assert_eq!(svg.matches("class=\"c ours\"").count(), 2, "one in the legend, one in the panel");
        assert!(svg.contains("a&lt;b, s") && svg.contains("rate, 1/s") && svg.contains("prefers-color-scheme:dark"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn a_panel_without_figures_says_so() {
        assert!(svg("Curves", &[panel(&[f64::NAN], false)], "kv").contains("not measured"));
        assert!(svg("Curves", &[panel(&[0.0], true)], "kv").contains("not measured"));
    }

    #[test]
    fn a_page_needs_nothing_from_elsewhere() {
        let section = Section { title: "W1".into(), panels: vec![panel(&[1.0, 3.0], true)], ..Section::default() };
        let page = html("Policies", &[section], "kv");
        assert!(page.contains("<svg") && !page.contains("src=") && !page.contains("href="));
    }

    proptest! {
        #[test]
        fn any_values_make_a_picture_of_numbers(
            values in prop::collection::vec(prop::num::f64::ANY, 0..9), is_logarithmic: bool,
        ) {
            let values: Vec<f64> = values.into_iter().filter(|v| v.is_nan() || v.abs() < 1e12 && v.abs() > 1e-12).collect();
            let svg = svg("x", &[panel(&values, is_logarithmic)], "kv");
            prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{}", svg);
        }
    }
}
