//! Lanes: requests and replies by memory that is shared with a gateway, for gateways that look instead of sleeping.
//!
//! A gateway that has said hello asks for a lane on its socket (`open_lane`). The reply brings the memory and the
//! gateway's end of a bell as descriptors. From then on the lane is one more connection of the core: its bytes come from
//! a ring instead of a socket ([`LaneStream`]), what drives them and what answers is the same. The socket stays, for
//! those who want to use both, and because its end is the lane's: a process that dies closes it.
//!
//! Replies go where their requests came, late ones and a watch's too. When the ring of replies is full nothing more is
//! read from the ring of requests; a gateway that leaves it full is closed as on a socket. What a gateway can do to the
//! memory, and why it does not matter, is said in [`crate::lane`].

mod attending;
mod carrier;
mod handing;
mod opening;
mod stream;
mod terms;

pub(in crate::serve) use attending::attend;
pub(in crate::serve) use carrier::Carrier;
pub(in crate::serve) use handing::hand_over;
pub(in crate::serve) use opening::CoreLanes;
pub use opening::Handed;
#[cfg(doc)]
use stream::LaneStream;
pub use terms::Lanes;
