//! Prompts as people and scripts write them.

use serde::Deserialize;

/// One prompt to ask about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Question {
    /// Token ids, little-endian u32 each.
    pub(super) tokens: Vec<u8>,
    /// LoRA adapter; `None` = none.
    pub(super) lora: Option<String>,
    /// Cache salt; `None` = none.
    pub(super) salt: Option<String>,
}

impl Question {
    /// A question about these tokens.
    pub(super) fn of(tokens: &[u32]) -> Self {
        Self { tokens: tokens.iter().flat_map(|token| token.to_le_bytes()).collect(), ..Self::default() }
    }

    /// How many tokens the prompt has.
    pub(super) const fn token_count(&self) -> usize {
        self.tokens.len() / 4
    }
}

/// Reads token ids: a JSON array, or integers between whitespace or commas.
///
/// # Errors
/// Which entry is not a token id, in words.
pub(super) fn tokens(text: &str) -> Result<Vec<u32>, String> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).map_err(|error| format!("not a JSON array of token ids: {error}"));
    }
    if text.trim_start().starts_with('{') {
        return Err(
            "a JSON object, where a list of token ids is wanted; prompts as objects, one a line, go to --batch"
                .to_owned(),
        );
    }
    let mut tokens = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for word in line.split([',', ' ', '\t', '\r']).filter(|word| !word.is_empty()) {
            let token = word.parse().map_err(|_| {
                format!("line {}: `{word}`, entry {}, is not a token id (0 to 4294967295)", at + 1, tokens.len() + 1)
            })?;
            tokens.push(token);
        }
    }
    Ok(tokens)
}

/// One line of a batch file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    tokens: Vec<u32>,
    #[serde(default)]
    lora: Option<String>,
    #[serde(default)]
    salt: Option<String>,
}

/// Reads a batch: `{"tokens":[...],"lora":...,"salt":...}` a line, absent or null = none. Empty lines are
/// skipped.
///
/// # Errors
/// Every line that cannot be read, by number.
pub(super) fn batch(text: &str) -> Result<Vec<Question>, String> {
    let mut questions = Vec::new();
    let mut complaints = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str::<Line>(line) {
            Ok(line) => questions.push(Question { lora: line.lora, salt: line.salt, ..Question::of(&line.tokens) }),
            // serde_json counts lines within what it was given, which is always line 1.
            Err(error) => {
                complaints.push(format!("line {}: {}", at + 1, error.to_string().replace(" at line 1 ", " at ")))
            }
        }
    }
    if complaints.is_empty() { Ok(questions) } else { Err(complaints.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_json_or_as_words() {
        assert_eq!(tokens("1,2,3").unwrap(), [1, 2, 3]);
        assert_eq!(tokens(" [1, 2,\n 4294967295]\n").unwrap(), [1, 2, u32::MAX]);
        assert_eq!(tokens("1 2\r\n\t3\n").unwrap(), [1, 2, 3]);
        assert_eq!(tokens("").unwrap(), [0_u32; 0]);
        assert_eq!(Question::of(&[1, 0x0102]).tokens, [1, 0, 0, 0, 2, 1, 0, 0]);
        assert_eq!(Question::of(&[7, 7]).token_count(), 2);
    }

    #[test]
    fn what_is_no_token_is_named() {
        assert!(tokens("1 2\n3 x").unwrap_err().contains("line 2: `x`, entry 4"));
        assert!(tokens("1,-2").unwrap_err().contains("`-2`"));
        assert!(tokens("4294967296").unwrap_err().contains("0 to 4294967295"));
        assert!(tokens("[1, 2.5]").unwrap_err().contains("JSON array"));
        assert!(tokens("[1").is_err());
        assert!(tokens("\n{\"tokens\":[1]}").unwrap_err().contains("--batch"));
    }

    #[test]
    fn a_batch_is_one_question_a_line_in_order() {
        let read =
            batch("{\"tokens\":[1]}\n\n{\"tokens\":[2],\"lora\":\"l\",\"salt\":null}\n{\"salt\":\"s\",\"tokens\":[]}")
                .unwrap();
        assert_eq!(read[0], Question::of(&[1]));
        assert_eq!(read[1], Question { lora: Some("l".into()), ..Question::of(&[2]) });
        assert_eq!(read[2], Question { salt: Some("s".into()), ..Question::of(&[]) });
        assert_eq!(read.len(), 3);
    }

    #[test]
    fn every_bad_line_of_a_batch_is_named() {
        let complaints =
            batch("{\"tokens\":[1]}\nnonsense\n{\"tokens\":[-1]}\n{\"lora\":\"x\"}\n{\"tokens\":[1],\"slat\":\"s\"}\n")
                .unwrap_err();
        let lines: Vec<_> = complaints.lines().collect();
        assert_eq!(lines.len(), 4, "{complaints}");
        for (line, words) in
            lines.iter().zip(["line 2: ", "line 3: ", "line 4: missing field `tokens`", "line 5: unknown field `slat`"])
        {
            assert!(line.starts_with(words), "{line}");
        }
        assert!(!complaints.contains("line 1"), "{complaints}");
    }
}
