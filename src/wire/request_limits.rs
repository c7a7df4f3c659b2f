//! The limits of a request that reaches the daemon without a frame, with the errors that its frame would get.

use super::decode_request::name;
use super::encode_request::check_lengths;
use super::route_request_codec::{
    check_candidates_max, check_hashes, check_label, check_label_weight, check_overrides, priority_jump,
    unnamed_booking,
};
use crate::error::Result;
use crate::protocol::{Prompt, RouteRequest};

/// Refuses a request that no frame could carry, or that the daemon would refuse in a frame.
pub(crate) fn check_request(request: &RouteRequest<'_>) -> Result<()> {
    check_lengths(request)?;
    if request.book.is_some_and(|book| book.request_id.is_empty()) {
        return Err(unnamed_booking());
    }
    check_candidates_max(request.candidates_max)?;
    let names = [
        ("request_id", request.book.map(|book| book.request_id)),
        ("lora", request.lora),
        ("salt", request.salt),
        ("affinity_session", request.affinity_session),
    ];
    names.into_iter().try_for_each(|(field, value)| name(field, value).map(drop))?;
    if let Prompt::LocalHashes { hashes, scheme, token_count } = request.prompt {
        check_hashes(hashes, Some(scheme), token_count)?;
    }
    request.required_taints.iter().try_for_each(|label| check_label("required_taints", label))?;
    for (label, weight) in request.preferred_taints.iter() {
        check_label("preferred_taints", label)?;
        check_label_weight(weight)?;
    }
    check_overrides(&request.overrides)?;
    priority_jump(request.priority_jump).map(drop)
}
