//! Chat templates as transformers renders them (`transformers/utils/chat_template_utils.py`, 5.19): Jinja with
//! `trim_blocks`, `lstrip_blocks` and loop controls, `tojson` as `json.dumps`, `raise_exception`, `strftime_now`.
//!
//! One difference is known: `repr` escapes characters that Python cannot print, which minijinja leaves alone. It shows
//! where a template writes a list or an object as text, not as JSON.
//!
//! A template comes with a model's folder and may be hostile. Fuel bounds its time and its memory (about 64 bytes for
//! each unit, says minijinja), a limit bounds its recursion, and a writer the text.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json::{Layout, dumps};
use crate::limits::{LOCAL_TEMPLATE_FUEL, LOCAL_TEMPLATE_RECURSION, LOCAL_TEXT_BYTES_MAX};

/// The only template of its environment.
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub(in crate::tokens) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Whether it iterates over the parts of a message's content.
    takes_parts: bool,
}

impl ChatTemplate {
    /// Compiles a template. The error says what is wrong and in which line.
    pub(in crate::tokens) fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(LOCAL_TEMPLATE_FUEL));
        environment.set_recursion_limit(LOCAL_TEMPLATE_RECURSION);
        // Text for a tokenizer has nothing to escape.
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", strftime_now);
        let compiled = environment.add_template_owned(NAME, without_generation_tags(source));
        compiled.map_err(|error| reason(&error))?;
        Ok(Self { environment, source: source.to_owned(), takes_parts: iterates_over_content(source) })
    }

    /// Whether messages have their content as a list of parts, not as one text. vLLM decides this by the template
    /// (`_detect_content_format` of `vllm/renderers/hf.py`).
    pub(super) const fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    /// Whether the template's text has this word.
    pub(super) fn mentions(&self, word: &str) -> bool {
        self.source.contains(word)
    }

    /// Renders the template. The error has no part of a prompt.
    pub(super) fn render(&self, context: Value) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| reason(&error))?;
        let mut text = BoundedText(Vec::new());
        template.render_captured_to(context, &mut text).map_err(|error| reason(&error))?;
        String::from_utf8(text.0).map_err(|_| "its output is no text".to_owned())
    }
}

/// What went wrong, without the error's detail, which may quote the prompt.
fn reason(error: &Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" in line {line}"));
    format!("{}{line}", error.kind())
}

/// The rendered text, up to its bound.
struct BoundedText(Vec<u8>);

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LOCAL_TEXT_BYTES_MAX {
            return Err(io::Error::other("the text is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `json.dumps` with the arguments that transformers passes on.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes arguments so")]
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.filter(|indent| !indent.is_none()).map(usize::try_from).transpose()?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators =
        separators.and_then(|pair| <[String; 2]>::try_from(pair).ok()).map(|[comma, colon]| (comma, colon));
    let layout = Layout {
        indent: indent.map(|indent| indent.min(INDENT_MAX)),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
    };
    options.assert_all_used()?;
    let text = dumps(value, &layout).ok_or_else(|| Error::new(ErrorKind::BadSerialization, "it is no JSON"))?;
    Ok(Value::from(text))
}

/// No template indents more.
const INDENT_MAX: usize = 16;

/// The day, as an engine in UTC writes it. Prompts with the time of day are not the engine's, so such formats fail.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let unknown = || Error::new(ErrorKind::InvalidOperation, "a date format that is not supported");
    date(now / 86_400, format).ok_or_else(unknown)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `strftime` of a day, counted from 1970-01-01; `None` = the format has more than a date.
fn date(days: u64, format: &str) -> Option<String> {
    // Years begin in March here, so that the leap day is the last one (Howard Hinnant, "chrono-compatible low-level
    // date algorithms", civil_from_days).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let month_name = MONTHS[(month - 1) as usize];
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        match chars.next()? {
            'd' => text.push_str(&format!("{day:02}")),
            'm' => text.push_str(&format!("{month:02}")),
            'Y' => text.push_str(&year.to_string()),
            'y' => text.push_str(&format!("{:02}", year % 100)),
            'B' => text.push_str(month_name),
            'b' => text.push_str(&month_name[..3]),
            'A' => text.push_str(weekday),
            'a' => text.push_str(&weekday[..3]),
            '%' => text.push('%'),
            _ => return None,
        }
    }
    Some(text)
}

/// The tags of a template, `{% … %}`: where each begins and ends, and its words.
fn tags(source: &str) -> impl Iterator<Item = (usize, usize, &str)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + source.get(from..)?.find("{%")?;
        let end = start + source.get(start..)?.find("%}")? + 2;
        from = end;
        let inner = source.get(start + 2..end - 2)?;
        Some((start, end, inner.trim_matches(['-', '+']).trim()))
    })
}

/// The template with `{% generation %}` blocks as blocks that are always rendered: transformers only notes where they
/// are.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut from = 0;
    for (start, end, words) in tags(source) {
        let instead = match words {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        text.push_str(&source[from..start]);
        text.push_str(&source[start..end].replace(words, instead));
        from = end;
    }
    text.push_str(&source[from..]);
    text
}

/// Whether a loop goes over `content`, `X.content` or `X['content']`. vLLM follows variables through the syntax tree;
/// a template for which both differ is found out by the comparison of tokens.
fn iterates_over_content(source: &str) -> bool {
    tags(source).any(|(_, _, words)| {
        let Some(iterated) = words.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")).map(|(_, rest)| rest)
        else {
            return false;
        };
        let iterated = iterated.split(['|', '(']).next().unwrap_or_default();
        let iterated = iterated.split(" if ").next().unwrap_or_default().trim();
        let is_item = |quote: char| iterated.ends_with(&format!("[{quote}content{quote}]"));
        iterated == "content" || iterated.ends_with(".content") || is_item('\'') || is_item('"')
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn render(source: &str, context: Value) -> Result<String, String> {
        ChatTemplate::new(source).and_then(|template| template.render(context))
    }

    #[test]
    fn blocks_are_trimmed_and_values_written_as_python_does() {
        let source = "{% for m in messages %}\n  {% if m.a %}\n{{ m.a }}|{{ none }}|{{ true }}\n  {% endif %}\n{% endfor %}\nend\n";
        assert_eq!(render(source, context! { messages => [context! { a => "x" }] }), Ok("x|None|True\nend".into()));
        assert_eq!(render("{{ '<&>' }}{{ a|tojson }}", context! { a => ["<&>"] }), Ok("<&>[\"<&>\"]".into()));
        let source =
            "{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ ' a '.strip() }}";
        assert_eq!(render(source, context! {}), Ok("01a".into()));
        let source = "a{%- generation -%} b {% endgeneration %}c";
        assert_eq!(render(source, context! {}), Ok("ab c".into()));
        assert_eq!(
            render("{{ a|tojson(indent=1, sort_keys=true) }}", context! { a => context! { x => 1 } }),
            Ok("{\n \"x\": 1\n}".into())
        );
    }

    #[test]
    fn errors_tell_no_prompt() {
        let secret = context! { messages => ["a secret"] };
        for source in [
            "{{ raise_exception(messages[0]) }}",
            "{{ messages[0].x.y }}",
            "{{ messages[0] + 1 }}",
            "{{ messages[0]|nothing }}",
            "{{ messages[0]|tojson(separators=1) }}",
            "{{ strftime_now('%H') }}",
            "{% include messages[0] %}",
        ] {
            let error = render(source, secret.clone()).expect_err(source);
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn hostile_templates_end() {
        let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let doubling =
            "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}";
        let long = "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}";
        let repeated = "{{ 'a' * 1000000000 }}{{ [1] * 1000000000 }}";
        let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        let padded = "{{ 'a'|indent(1000000000) }}{{ 'a'.replace('', 'b' * 100000) }}";
        let nested =
            "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v] %}{% endfor %}{{ n.v|tojson }}";
        for source in [endless, doubling, long, repeated, recursive, nested] {
            assert!(render(source, context! {}).is_err(), "{source}");
        }
        let _ = render(padded, context! {});
        for source in
            ["{% if %}", "{{", &"(".repeat(100_000), &("{{ ".to_owned() + &"[".repeat(100_000)), "{% generation"]
        {
            let _ = ChatTemplate::new(source);
        }
        let deep = "{% if true %}".repeat(5000);
        assert!(ChatTemplate::new(&deep).is_err());
    }

    /// `datetime.date(1970, 1, 1) + timedelta(days)` of Python 3.11.
    #[test]
    fn dates_are_pythons() {
        for (days, expected) in [
            (0, "Thu Thursday 01 01 Jan January 70 1970"),
            (11_016, "Tue Tuesday 29 02 Feb February 00 2000"),
            (20_000, "Fri Friday 04 10 Oct October 24 2024"),
            (20_513, "Sun Sunday 01 03 Mar March 26 2026"),
        ] {
            assert_eq!(date(days, "%a %A %d %m %b %B %y %Y").as_deref(), Some(expected));
        }
        assert_eq!((date(0, "100%%"), date(0, "%H"), date(0, "%")), (Some("100%".into()), None, None));
    }

    #[test]
    fn templates_that_iterate_over_parts_are_told() {
        for (source, expected) in [
            ("{% for p in m['content'] %}", true),
            ("{%- for p in message.content -%}", true),
            ("{% for p in content %}", true),
            ("{% for p in message[\"content\"]|list if p %}", true),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", false),
            ("{% for t in message.tool_calls %}", false),
            ("{{ content }}", false),
        ] {
            assert_eq!(iterates_over_content(source), expected, "{source}");
        }
    }
}
