"""A daemon that means harm: it says hello as a real one does, and then does what its test names."""

from __future__ import annotations

import array
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import flatbuffers

from kvrouted import frames
from kvrouted.schema_generated import routing_generated as fb

#: Bit of the hello's features: the daemon has lanes.
FEATURE_LANES = 1 << 17
#: Rows that one reply lists: every one of them is the same row.
LISTED = 200_000

Behave = Callable[[socket.socket, frames.Header], None]


def frame(correlation_id: int, kind: int, builder: flatbuffers.Builder, root: int) -> bytes:
    """A reply as a daemon sends it."""
    builder.Finish(root, file_identifier=b"KVRT")
    body = bytes(builder.Output())
    body += bytes(-len(body) % 8)
    return frames._HEADER.pack(len(body), kind, 0, 1, correlation_id) + body


def hello_reply(correlation_id: int, features: int, block_size: int) -> bytes:
    """A hello with one space, `m`."""
    builder = flatbuffers.Builder(256)
    model, namespace = builder.CreateString("m"), builder.CreateString("")
    fb.SchemeStart(builder)
    fb.SchemeAddBlockSize(builder, block_size)
    scheme = fb.SchemeEnd(builder)
    fb.SpaceStart(builder)
    fb.SpaceAddModel(builder, model)
    fb.SpaceAddNamespace(builder, namespace)
    fb.SpaceAddScheme(builder, scheme)
    space = fb.SpaceEnd(builder)
    builder.StartVector(4, 1, 4)
    builder.PrependUOffsetTRelative(space)
    spaces = builder.EndVector()
    fb.LimitsStart(builder)
    fb.LimitsAddFrameBodyBytesMax(builder, 8 << 20)
    fb.LimitsAddPromptTokensMax(builder, 1 << 21)
    limits = fb.LimitsEnd(builder)
    fb.HelloReplyStart(builder)
    fb.HelloReplyAddVersion(builder, 1)
    fb.HelloReplyAddInstanceId(builder, 7)
    fb.HelloReplyAddLimits(builder, limits)
    fb.HelloReplyAddFeatures(builder, features)
    fb.HelloReplyAddSpaces(builder, spaces)
    return frame(correlation_id, fb.Kind.HelloReply, builder, fb.HelloReplyEnd(builder))


def stray() -> bytes:
    """A reply to no request."""
    builder = flatbuffers.Builder(64)
    fb.ReportLoadReplyStart(builder)
    return frame(1 << 40, fb.Kind.ReportLoadReply, builder, fb.ReportLoadReplyEnd(builder))


def page(correlation_id: int, next_cursor: int) -> bytes:
    """An empty page of workers that names a next one."""
    builder = flatbuffers.Builder(64)
    builder.StartVector(4, 0, 4)
    workers = builder.EndVector()
    fb.WorkersReplyStart(builder)
    fb.WorkersReplyAddWorkers(builder, workers)
    fb.WorkersReplyAddNextCursor(builder, next_cursor)
    return frame(correlation_id, fb.Kind.WorkersReply, builder, fb.WorkersReplyEnd(builder))


def candidates(correlation_id: int, count: int = LISTED) -> bytes:
    """A reply, of 0.8 MB unless `count` says otherwise, that lists one candidate over and over."""
    builder = flatbuffers.Builder(count * 4 + 1024)
    fb.CandidateStart(builder)
    candidate = fb.CandidateEnd(builder)
    builder.StartVector(4, count, 4)
    for _ in range(count):
        builder.PrependUOffsetTRelative(candidate)
    listed = builder.EndVector()
    fb.RouteReplyStart(builder)
    fb.RouteReplyAddCandidates(builder, listed)
    return frame(correlation_id, fb.Kind.RouteReply, builder, fb.RouteReplyEnd(builder))


def endless_name(correlation_id: int) -> bytes:
    """A page whose 4000 workers share one name of a megabyte."""
    builder = flatbuffers.Builder(2 << 20)
    name = builder.CreateString("n" * (1 << 20))
    fb.WorkerInfoStart(builder)
    fb.WorkerInfoAddName(builder, name)
    worker = fb.WorkerInfoEnd(builder)
    builder.StartVector(4, 4000, 4)
    for _ in range(4000):
        builder.PrependUOffsetTRelative(worker)
    workers = builder.EndVector()
    fb.WorkersReplyStart(builder)
    fb.WorkersReplyAddWorkers(builder, workers)
    return frame(correlation_id, fb.Kind.WorkersReply, builder, fb.WorkersReplyEnd(builder))


# ---- what it does with a request -------------------------------------------------------------------------


def floods(peer: socket.socket, _: frames.Header) -> None:
    """Sends replies to no request, without end."""
    many = stray() * 1000
    while True:
        peer.sendall(many)


def trickles(peer: socket.socket, request: frames.Header) -> None:
    """Sends the answer byte by byte, and it is 64 MiB long."""
    peer.sendall(frames._HEADER.pack(64 << 20, request.kind + 1, 0, 1, request.correlation_id))
    while True:
        peer.sendall(b"\0")


def turns_pages(peer: socket.socket, request: frames.Header) -> None:
    """Answers each question for workers with a page that names another."""
    peer.sendall(page(request.correlation_id, request.correlation_id + 1))


def lists_without_end(peer: socket.socket, request: frames.Header) -> None:
    """Answers a route with 0.8 MB of one candidate, and a question for workers with one name 4000 times."""
    make = candidates if request.kind == fb.Kind.Route else endless_name
    peer.sendall(make(request.correlation_id))


def hands_descriptors(peer: socket.socket, request: frames.Header) -> None:
    """Answers the question for a lane in many parts, each of which carries two descriptors."""
    header = frames._HEADER.pack(64, request.kind + 1, 0, 1, request.correlation_id)
    with open(os.devnull, "rb") as nothing:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [nothing.fileno()] * 2))]
        for byte in header + bytes(64):
            peer.sendmsg([bytes([byte])], rights)


class Hostile:
    """Listens on a socket of its own until it is closed. Used with `with`."""

    def __init__(self, behave: Behave, *, block_size: int = 16) -> None:
        self.behave, self.block_size = behave, block_size
        self.folder = tempfile.TemporaryDirectory(prefix="kvrouted-")
        self.socket = str(Path(self.folder.name) / "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.socket)
        self.listener.listen()
        self.peers: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for peer in self.peers:
            peer.close()
        self.folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            self.peers.append(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        received = bytearray()
        try:
            while data := peer.recv(1 << 16):
                received += data
                while len(received) >= frames.HEADER_BYTES:
                    request = frames.parse_header(received)
                    end = frames.HEADER_BYTES + request.body_bytes
                    if len(received) < end:
                        break
                    del received[:end]
                    if request.kind == fb.Kind.Hello:
                        peer.sendall(hello_reply(request.correlation_id, FEATURE_LANES, self.block_size))
                    else:
                        self.behave(peer, request)
        except OSError:
            return  # the client has gone
