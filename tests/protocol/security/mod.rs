//! Hostile clients against the real daemon: each attack, and that it leaves nothing behind.
//!
//! The bounds of `limits` that a client can reach, and the tests that show that the daemon checks each before it
//! reserves anything. Tests are named from this folder.
//!
//! | bound | test |
//! |---|---|
//! | `FRAME_BODY_BYTES_CEILING`, `FRAME_BODY_BYTES_MAX_DEFAULT`, `FRAME_ALIGN_BYTES` | `frames::lengths_that_lie_reserve_nothing` |
//! | `RECEIVE_BUFFER_BYTES_MIN`, `_KEPT`, `RECEIVE_BUFFER_READS_KEPT` | the same; unit tests of `serve::receive` |
//! | `CORE_RECEIVE_BYTES_MAX`, `ADMIN_FRAME_BODY_BYTES_MAX` | `pace::large_frames_that_never_end_…`; unit tests of `serve::receive` |
//! | `READS_PER_QUANTUM_MAX`, `FRAMES_PER_QUANTUM_MAX` | `pace::thousands_of_tiny_frames_…`; unit tests of `serve::connection` |
//! | `WORK_PER_QUANTUM_MAX`, `WORKER_WORK` | `serving::fairness`; unit tests of `serve::connection` |
//! | `REPLY_BUFFER_BYTES_MAX`, `_KEPT` | unit tests of `serve::connection`, `serve::reply_writer`; `serving::lifecycle` |
//! | `FRAME_TIMEOUT_MS_CEILING`, `FRAME_TIMEOUT_CHECKS` | `pace::who_sends_a_frame_byte_by_byte_…`, `pace::who_never_says_hello_…` |
//! | `ERROR_TEXT_BYTES_MAX` | `bounds::as_much_as_may_be_…` |
//! | `REQUEST_OVERHEAD_BYTES_MAX` | asserted in `limits` against what it is for; `bounds::as_much_as_may_be_…` |
//! | `FRAME_TABLE_DEPTH_MAX` | no table of the schema holds its like: nothing can nest deeper than it says; fuzz target `request` |
//! | `REQUEST_TABLES_MAX` | `bounds::tables_are_counted_before_they_are_looked_at` |
//! | `CONNECTIONS_MAX` | `pace::more_connections_than_may_be_…` |
//! | `ADMIN_ANSWERS_WAITING_MAX` | `pace::an_admin_who_takes_no_reply_is_closed` |
//! | `CORE_REPLIES_BYTES_MAX`, and all other parts of the memory budget | `memory` of test `daemon`; unit tests of `budget` |
//! | `ADMIN_CONNECTIONS_MAX` | `pace::who_never_says_hello_…`; `serving::lifecycle` |
//! | `DESCRIPTORS_…`, `CONNECTIONS_MIN` | `descriptors`; unit tests of `ingest::descriptors` |
//! | `MAILBOX_MESSAGES_MAX`, `LISTEN_BACKLOG` | a flood may meet them in `pace::more_connections_than_may_be_…` |
//! | `LOG_LINES_PER_WINDOW_MAX`, `LOG_WINDOW_MS` | `identity::who_is_not_listed_…`; unit tests of `log_quota` |
//! | `METRICS_CONNECTIONS_MAX`, `METRICS_CONNECTION_MS_MAX` | unit tests of `serve::metrics_page` |
//! | `METRICS_PAGES_MAX`, `METRICS_PAGE_MS_MIN` | the same; `http::siege` |
//! | `HTTP_CONNECTIONS_MAX`, `HTTP_CONNECTIONS_RESERVED`, `HTTP_DISPLACE_AFTER_MS` | `http::siege`; unit tests of `serve::http` |
//! | `HTTP_REPLIES_BYTES_MAX`, `HTTP_REPLY_BYTES_PER_S_MIN` | the same |
//! | `ALLOWED_ACCOUNTS_MAX`, `PEER_GROUPS_MAX` | `identity`; unit tests of `serve::accept` |
//! | `PROMPT_TOKENS_MAX`, `PROMPT_BLOCKS_MAX` | `bounds::as_much_as_may_be_…` |
//! | `NAME_BYTES_MAX` | `bounds::as_much_as_may_be_…`, `bounds::names_and_reasons_elsewhere_…` |
//! | `MEDIA_HASHES_MAX`, `ALLOW_LIST_MAX`, `REQUEST_TAINTS_MAX`, `SHARED_HITS_MAX` | `bounds::as_much_as_may_be_…` |
//! | `CANDIDATES_MAX`, `WORKERS_PAGE_MAX`, `WORKER_FIELDS_MAX` | `bounds::names_and_reasons_elsewhere_…` |
//! | `BOOKINGS_PER_SESSION_MAX` | `bookings::who_books_and_never_frees_…` |
//! | `SESSIONS_MAX`, `ACTIVE_WORDS_MAX`, `BOOKINGS_MAX` | one user's share of them in `users`; unit tests of `load` |
//! | `QUEUE_REQUESTS_…`, `QUEUE_BYTES_MAX`, `QUEUE_SETS_MAX` | unit tests of `queue`; `queue` of test `routing` |
//! | `serve.user_share_percent` of everything in `shares::SharedResource` | `users` |
//! | `AFFINITY_SESSIONS_CEILING` | `affinity` of test `routing` |
//! | `ZMQ_MESSAGE_BYTES_MAX`, `ZMQ_PARTS_MAX`, `ZMQ_COMMAND_BYTES_MAX`, `RELAY_REQUEST_…` | `peers`; unit tests of `zmtp` |
//! | `ZMQ_MESSAGE_BYTES_FREE`, `SHARD_MESSAGES_BYTES_MAX` | `unfinished_messages` of test `attack`; unit tests of `zmtp` |
//! | `RELAY_PEERS_…`, `RELAY_SUBSCRIBER_…`, `RELAY_HANDSHAKE_MS_MAX` | unit tests of `zmtp` |
#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

mod besieged;
mod bookings;
mod bounds;
mod descriptors;
mod frames;
pub(crate) mod identity;
mod pace;
mod peers;
mod users;
