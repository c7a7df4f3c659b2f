//! Words that `docs/glossary.md` retires, and words that stand for a noun that should be named.

/// In lower case. A name counts as its words: `see_off` and `SeeOff` are `see off`.
const WORDS: &[&str] = &[
    "so many",
    "so much",
    "so long",
    "is told",
    "are told",
    "is looked at",
    "taken for",
    "nobody",
    "somebody",
    "whoever",
    "whose turn",
    "homonyms",
    "islands",
    "turnstile",
    "berth",
    "muster",
    "roster",
    "desk",
    "looker",
    "reproach",
    "choosy",
    "unruled",
    "unheard",
    "oddity",
    "oddities",
    "patience",
    "parked",
    "stirred",
    "twin",
    "twins",
    "see off",
    "call roll",
];

/// Names of metrics, findings and error codes that hold such a word, and one phrase. They stay.
const NAMES: &[&str] = &[
    "nobody available",
    "nobody eligible",
    "pairs nobody",
    "prefill nobody",
    "routes nobody",
    "shadow nobody",
    "told apart",
    "worker oddities",
    "workers unheard",
];

/// Fields and keys that hold such a word, as the sources write them. They stay too.
const FIELDS: &[&str] = &[
    // `RouteReply.nobody` of the schema, in its accessors and in the reply's value.
    ".nobody",
    "nobody:",
    "VT_NOBODY",
    // A column of the journal.
    "\"nobody_code\"",
    // Counters of a worker in a status reply.
    "\"oddity_{",
    "\"unruled_",
];

/// The words of a text in lower case, each with a space before and after it; names are taken apart.
fn words_of(text: &str) -> String {
    let (mut words, mut before) = (String::from(" "), ' ');
    for c in text.chars() {
        let begins = !c.is_alphanumeric() || (c.is_uppercase() && before.is_lowercase());
        if begins && !words.ends_with(' ') {
            words.push(' ');
        }
        if c.is_alphanumeric() {
            words.extend(c.to_lowercase());
        }
        before = c;
    }
    words.push(' ');
    words
}

/// The retired words of a line.
pub(crate) fn retired(line: &str) -> Vec<&'static str> {
    let mut line = line.to_owned();
    FIELDS.iter().for_each(|field| line = line.replace(field, " "));
    let mut text = words_of(&line);
    for name in NAMES.iter().map(|name| format!(" {name} ")) {
        while text.contains(&name) {
            text = text.replacen(&name, " ", 1);
        }
    }
    WORDS.iter().copied().filter(|word| text.contains(&format!(" {word} "))).collect()
}

#[test]
fn words_are_found_in_prose_and_in_names() {
    assert_eq!(retired("For so many blocks, whoever asks."), ["so many", "whoever"]);
    assert_eq!(retired("fn see_off(muster: &Muster)"), ["muster", "see off"]);
    assert_eq!(retired("Kind::NobodyAvailable => ReplyNotes::PREFILL_NOBODY"), [""; 0]);
    assert_eq!(retired("the taken form is also much longer"), [""; 0]);
}
