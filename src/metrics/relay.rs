//! What a relay counts.

use super::CounterName;

counters! {
    /// Once per relay.
    RelayCounter {
        Batches = "relay_batches", "Batches sent.";
        BatchBytes = "relay_batch_bytes", "Bytes of their payloads.";
        Heartbeats = "relay_heartbeats", "Heartbeats sent.";
        SendsFailed = "relay_sends_failed", "Batches and heartbeats not sent to anybody because too many waited for the sending thread.";
        MessagesDropped = "relay_messages_dropped", "Messages that one subscriber did not get because too much waited for it; it asks for them.";
        PeersRefused = "relay_peers_refused", "Connections refused because too many were open, over all or from one address.";
        PeersCut = "relay_peers_cut", "Connections cut because of what came over them, or because the handshake took too long.";
        PeersStalled = "relay_peers_stalled", "Connections cut because their peer read nothing for too long, or fell too far behind the stream.";
        Generations = "relay_generations", "Times a new generation began because no batch could say what changed.";
        BatchesForgotten = "relay_batches_forgotten", "Batches dropped from the replay buffer because it was full.";
        Questions = "relay_questions", "Replays asked for.";
        QuestionsMisframed = "relay_questions_misframed", "Messages to the replay socket that are no question, ignored.";
        QuestionsRefused = "relay_questions_refused", "Replays not answered because too many were being answered.";
        Answers = "relay_answers", "Replays answered to the end.";
        AnswersStalled = "relay_answers_stalled", "Replays given up because whoever asked took nothing for too long.";
        AnswersUnreachable = "relay_answers_unreachable", "Replays given up because whoever asked was gone.";
        AnswersWithoutSnapshot = "relay_answers_without_snapshot", "Replays given up because the snapshot they needed failed.";
        Snapshots = "relay_snapshots", "Snapshots taken to the end.";
        SnapshotsFailed = "relay_snapshots_failed", "Snapshots that came to no end; the log names the reason.";
    }
}
