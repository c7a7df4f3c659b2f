//! The simulated engines' tokenizer: a toy with a rule that fits in one sentence. Each byte of UTF-8 is one token with
//! the byte's value, and what a chat template adds are tokens from 256 on:
//!
//! ```text
//! prompt of text     its bytes
//! prompt of messages for each: the token of its role, the bytes of its text, END; then the token of `assistant`
//! reply              bytes of ASCII, so that each token is one character
//! ```

use xxhash_rust::xxh3::xxh3_64;

/// The token after each message of a chat, and after a reply that is complete.
pub(super) const END: u32 = 260;
/// Tokens of roles, by the role's name.
const ROLES: [(&str, u32); 4] = [("system", 256), ("user", 257), ("assistant", 258), ("tool", 259)];

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) text: String,
}

/// The tokens of a text.
pub(super) fn text_tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The tokens of a chat; the error names a role without a token.
pub(super) fn chat_tokens(messages: &[Message], adds_generation_prompt: bool) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::new();
    for message in messages {
        let role = ROLES.iter().find(|(name, _)| *name == message.role);
        let (_, token) = role.ok_or_else(|| format!("a simulated engine knows no role {:?}", message.role))?;
        tokens.push(*token);
        tokens.extend(text_tokens(&message.text));
        tokens.push(END);
    }
    if adds_generation_prompt {
        tokens.push(ROLES[2].1);
    }
    Ok(tokens)
}

/// What a simulated engine answers to a prompt: always the same to the same prompt, so that a conversation that quotes
/// it finds its blocks again.
pub(super) fn reply(prompt: &[u32]) -> String {
    let bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
    let draw = xxh3_64(&bytes);
    let subject = SUBJECTS[(draw % SUBJECTS.len() as u64) as usize];
    let verb = VERBS[(draw / 64 % VERBS.len() as u64) as usize];
    format!("A simulated engine has read {} tokens and says: {subject} {verb} (draw {draw:016x}).", prompt.len())
}

const SUBJECTS: [&str; 8] = [
    "the prefix",
    "a block of sixteen tokens",
    "the cache of this worker",
    "a conversation",
    "the first token",
    "a system prompt",
    "the least recently used block",
    "a long prompt",
];
const VERBS: [&str; 8] = [
    "is shared",
    "is computed once",
    "comes back",
    "finds its way",
    "waits for nobody",
    "is found again",
    "has gone elsewhere",
    "ends well",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, text: &str) -> Message {
        Message { role: role.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_chat_is_its_messages_between_marks() {
        let chat = [message("system", "Be"), message("user", "é")];
        assert_eq!(chat_tokens(&chat, true), Ok(vec![256, 66, 101, END, 257, 0xc3, 0xa9, END, 258]));
        assert_eq!(chat_tokens(&chat[..1], false), Ok(vec![256, 66, 101, END]));
        assert!(chat_tokens(&[message("oracle", "")], true).unwrap_err().contains("oracle"));
    }

    #[test]
    fn the_next_turn_begins_with_this_turns_prompt_and_reply() {
        let asked = [message("user", "hello")];
        let prompt = chat_tokens(&asked, true).expect("tokens");
        let text = reply(&prompt);
        assert!(text.is_ascii() && text == reply(&prompt));
        let next = [asked[0].clone(), message("assistant", &text), message("user", "go on")];
        let with_reply = [prompt, text_tokens(&text), vec![END]].concat();
        assert!(chat_tokens(&next, true).expect("tokens").starts_with(&with_reply));
    }
}
