//! A peer's bytes: the result does not depend on how they are split, and nothing is larger than its bounds.

use bytes::Bytes;
use kvrouted::zmtp::{Bounds, Decoder, Item, Refusal, Role};

const BOUNDS: Bounds = Bounds { message_bytes_max: 4 << 10, parts_max: 6, command_bytes_max: 256, keeps_parts: true };
const ROLES: [Role; 4] = [Role::Subscriber, Role::Dealer, Role::Publisher, Role::Router];

/// The first byte is our role, the second the length of the pieces in which the rest comes.
pub(crate) fn zmtp(data: &[u8]) {
    let [role, piece, bytes @ ..] = data else { return };
    let role = ROLES[usize::from(*role) % ROLES.len()];
    let whole = said(role, bytes, bytes.len());
    assert_eq!(said(role, bytes, usize::from(*piece)), whole);
    for item in &whole.0 {
        match item {
            Item::Message(message) => {
                assert!((1..=BOUNDS.parts_max).contains(&message.parts));
                assert!(
                    message.last.len() <= BOUNDS.message_bytes_max
                        && (message.parts > 1 || message.before_last.is_none())
                );
                let kept: usize = message.earlier.iter().map(Bytes::len).sum();
                assert_eq!(message.earlier.len() + 1, message.parts);
                assert!(kept + message.last.len() <= BOUNDS.message_bytes_max);
            }
            Item::Subscribe(body) | Item::Cancel(body) | Item::Ping(body) => {
                assert!(body.len() < BOUNDS.command_bytes_max);
            }
            Item::Greeted | Item::Ready | Item::Pong => {}
        }
    }
}

/// Everything that is made of the bytes, given in pieces of one length.
fn said(role: Role, bytes: &[u8], piece: usize) -> (Vec<Item>, Option<Refusal>) {
    let (mut decoder, mut items, mut held) = (Decoder::new(role, BOUNDS), Vec::new(), Vec::new());
    for piece in bytes.chunks(piece.max(1)) {
        held.extend_from_slice(piece);
        let mut input = Bytes::from(std::mem::take(&mut held));
        loop {
            match decoder.next(&mut input) {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break,
                Err(refusal) => return (items, Some(refusal)),
            }
        }
        assert!(decoder.missing_bytes() > 0);
        // Nothing waits but the beginning of one frame.
        assert!(input.len() <= BOUNDS.message_bytes_max + 9, "{} bytes", input.len());
        held = input.to_vec();
    }
    (items, None)
}
