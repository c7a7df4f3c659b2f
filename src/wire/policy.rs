//! Orders about the policy of a running daemon: their part of the wire.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

use crate::error::{Error, Kind, Result};
use crate::limits::POLICY_SETTINGS_MAX;
use crate::schema_generated::routing as fb;

/// What is to be done about the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyOrder<'a> {
    /// A shadow policy is to judge a share of the decisions.
    Shadow {
        /// What differs from each space's policy: fields of `[policy]` and their values.
        settings: &'a [(String, String)],
        /// Of the decisions, 0 to 1.
        share: f64,
    },
    /// The shadow policy is to be the one that decides.
    Promote,
    /// No shadow policy is to judge.
    EndShadow,
}

/// What has been done about the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyDone {
    /// The version of the policies that decide from now on.
    pub policy_version: u64,
    /// The share of decisions that a shadow policy judges from now on, 0 to 1.
    pub shadow_share: f64,
}

pub(super) fn encode<'b>(builder: &mut FlatBufferBuilder<'b>, order: &PolicyOrder<'_>) -> WIPOffset<fb::SetPolicy<'b>> {
    let (op, settings, share) = match *order {
        PolicyOrder::Shadow { settings, share } => (fb::PolicyOp::Shadow, settings, share),
        PolicyOrder::Promote => (fb::PolicyOp::Promote, &[][..], 0.0),
        PolicyOrder::EndShadow => (fb::PolicyOp::EndShadow, &[][..], 0.0),
    };
    let setting = |(name, value): &(String, String)| {
        let (name, value) = (builder.create_string(name), builder.create_string(value));
        fb::PolicyField::create(builder, &fb::PolicyFieldArgs { name: Some(name), value: Some(value) })
    };
    let settings: Vec<_> = settings.iter().map(setting).collect();
    let settings = builder.create_vector(&settings);
    let args = fb::SetPolicyArgs { op, settings: Some(settings), share, ..fb::SetPolicyArgs::default() };
    fb::SetPolicy::create(builder, &args)
}

/// The order in a table whose `must_understand` has been looked at.
pub(super) fn decode<'a>(table: &fb::SetPolicy<'_>, scratch: &'a mut Vec<(String, String)>) -> Result<PolicyOrder<'a>> {
    scratch.clear();
    let settings = table.settings().into_iter().flatten();
    scratch.extend(settings.take(POLICY_SETTINGS_MAX + 1).map(|of| (of.name().to_owned(), of.value().to_owned())));
    if scratch.len() > POLICY_SETTINGS_MAX {
        let what = format!("there are more than {POLICY_SETTINGS_MAX} settings of a policy");
        return Err(Error::new(Kind::InvalidArgument, what, "name each field once"));
    }
    match table.op() {
        fb::PolicyOp::Shadow if !(0.0..=1.0).contains(&table.share()) => {
            let what = format!("a share of {}", table.share());
            Err(Error::new(Kind::InvalidArgument, what, "name a share from 0 to 1"))
        }
        fb::PolicyOp::Shadow => Ok(PolicyOrder::Shadow { settings: scratch, share: table.share() }),
        fb::PolicyOp::Promote => Ok(PolicyOrder::Promote),
        fb::PolicyOp::EndShadow => Ok(PolicyOrder::EndShadow),
        other => {
            let what = format!("set_policy.op {} is not served here", other.0);
            Err(Error::new(Kind::Unsupported, what, "ask a daemon of a later release"))
        }
    }
}
