//! What is counted of shared-memory lanes.

use super::CounterName;

counters! {
    /// Once per daemon, counted by whichever core it happens on: lanes.
    LaneCounter {
        Opened = "lanes_opened", "Lanes opened.";
        BellsHeard = "lane_bells_heard", "Times a core slept for a lane and was woken by its bell.";
        RefusedOff = "lanes_refused_off", "Lanes refused because there are to be none.";
        RefusedFull = "lanes_refused_full", "Lanes refused because as many are open as may be.";
        RefusedUser = "lanes_refused_user", "Lanes refused because their user has as many open as one user may have.";
        RefusedSizes = "lanes_refused_sizes", "Lanes refused because rings of their sizes cannot be had.";
        RefusedSecond = "lanes_refused_second", "Lanes refused because the connection has one, or is one.";
        RefusedSystem = "lanes_refused_system", "Lanes refused, or closed before they began, because the kernel gave no memory or descriptors.";
        ClosedWithConnection = "lanes_closed_with_connection", "Lanes closed with their connection, whoever ended that, or because the gateway let go of the bell.";
        ClosedPositions = "lanes_closed_positions", "Lanes closed, with their connection, because a position in a ring cannot be.";
        ClosedHeader = "lanes_closed_header", "Lanes closed, with their connection, because a frame header could not be trusted.";
        ClosedUnread = "lanes_closed_unread", "Lanes closed, with their connection, because replies were left unread.";
        ClosedPanic = "lanes_closed_panic", "Lanes closed, with their connection, because answering a request panicked.";
    }
}
