//! What an expression of PromQL names: metrics with their matchers, and the labels by which it groups.

use std::collections::BTreeSet;

/// Words that are neither metrics nor functions. A function is followed by a parenthesis.
const WORDS: &[&str] = &["sum", "count", "avg", "max", "min", "and", "or", "unless", "bool"];
/// Words before a list of labels. (`by` and `without` also decide which labels are left.)
const GROUPINGS: &[&str] = &["by", "without", "on", "ignoring", "group_left", "group_right"];

/// A metric, with the labels and values that it must have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selector {
    pub(crate) metric: String,
    /// Label, and the text of the value or of the regular expression.
    pub(crate) matchers: Vec<(String, String)>,
}

/// What an expression names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) selectors: Vec<Selector>,
    /// Every word before a list of labels, with a label of the list.
    pub(crate) groupings: Vec<(String, String)>,
}

impl Named {
    /// The labels of lists after this word.
    pub(crate) fn grouped(&self, word: &str) -> BTreeSet<&str> {
        self.groupings.iter().filter(|(of, _)| of == word).map(|(_, label)| label.as_str()).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Text(String),
    Sign(char),
}

/// The tokens of an expression; ranges in brackets and numbers have none.
fn tokens(expression: &str) -> Vec<Token> {
    let is_part = |c: &char| c.is_ascii_alphanumeric() || "_:.$".contains(*c);
    let (mut tokens, mut rest) = (Vec::new(), expression.chars().peekable());
    while let Some(first) = rest.next() {
        match first {
            '"' => tokens.push(Token::Text(rest.by_ref().take_while(|c| *c != '"').collect())),
            '[' => drop(rest.by_ref().find(|c| *c == ']')),
            c if is_part(&c) => {
                let mut word = String::from(c);
                while let Some(c) = rest.next_if(is_part) {
                    word.push(c);
                }
                tokens.extend((!c.is_ascii_digit()).then_some(Token::Word(word)));
            }
            c if c.is_whitespace() => {}
            c => tokens.push(Token::Sign(c)),
        }
    }
    tokens
}

/// What an expression names.
pub(crate) fn named(expression: &str) -> Named {
    let (tokens, mut named) = (tokens(expression), Named::default());
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        let Token::Word(word) = token else { continue };
        let until = |sign: char| {
            let inside = tokens[at..].iter().take_while(|token| **token != Token::Sign(sign));
            inside.cloned().collect::<Vec<Token>>()
        };
        match tokens.get(at) {
            Some(Token::Sign('{')) => {
                let inside = until('}');
                at += inside.len();
                named.selectors.push(Selector { metric: word.clone(), matchers: matchers(&inside) });
            }
            Some(Token::Sign('(')) if GROUPINGS.contains(&word.as_str()) => {
                let inside = until(')');
                at += inside.len();
                named.groupings.extend(inside.iter().filter_map(|token| match token {
                    Token::Word(label) => Some((word.clone(), label.clone())),
                    Token::Text(_) | Token::Sign(_) => None,
                }));
            }
            Some(Token::Sign('(')) => {}
            _ if WORDS.contains(&word.as_str()) => {}
            _ => named.selectors.push(Selector { metric: word.clone(), matchers: Vec::new() }),
        }
    }
    named
}

/// The labels and values between braces.
fn matchers(inside: &[Token]) -> Vec<(String, String)> {
    let (mut found, mut label) = (Vec::new(), None);
    for token in inside {
        match (token, label.take()) {
            (Token::Word(word), _) => label = Some(word.clone()),
            (Token::Text(value), Some(label)) => found.push((label, value.clone())),
            (Token::Sign(',' | '{'), _) | (Token::Text(_), None) => {}
            (Token::Sign(_), named) => label = named,
        }
    }
    found
}

#[test]
fn metrics_matchers_and_groupings_are_found() {
    let named =
        named(r#"sum by (a, b) (rate(x_total{c=~"d|e",f!="g"}[5m])) / ignoring (h) (y > 0.5) unless up == bool 1"#);
    let of = |metric: &str, matchers: &[(&str, &str)]| Selector {
        metric: metric.to_owned(),
        matchers: matchers.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect(),
    };
    assert_eq!(named.selectors, [of("x_total", &[("c", "d|e"), ("f", "g")]), of("y", &[]), of("up", &[])]);
    assert_eq!(named.grouped("by"), BTreeSet::from(["a", "b"]));
    assert_eq!(named.grouped("ignoring"), BTreeSet::from(["h"]));
}
