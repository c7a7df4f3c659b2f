"""A relay in front of one engine that keeps the bytes of each answer, by the check's name for the request."""

import collections
import http.client
import http.server
import threading
import urllib.parse

HOP = {"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade", "proxy-connection", "host", "content-length"}


class Answer:
    def __init__(self, engine, path, status, kind):
        self.engine, self.path, self.status, self.kind, self.body = engine, path, status, kind, b""
        self.ended = threading.Event()


class Tap:
    """Listens on a free port of this machine until it is closed."""

    def __init__(self, engine):
        self.engine, self.answers, self.asked, self.lock = engine, {}, collections.Counter(), threading.Lock()
        at = urllib.parse.urlsplit(engine)

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            tap, upstream = self, None

            def log_message(self, *_):
                pass

            def finish(self):
                if self.upstream:
                    self.upstream.close()
                super().finish()

            def body(self):
                if self.headers.get("transfer-encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("content-length") or 0))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return b"".join(parts)

            def relay(self):
                if self.upstream is None:
                    self.upstream = http.client.HTTPConnection(at.hostname, at.port, timeout=300)
                body = self.body()
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
                with self.tap.lock:
                    self.tap.asked[self.headers.get("x-check-id")] += self.path == "/v1/chat/completions"
                try:
                    self.upstream.request(self.command, self.path, body, headers)
                    self.tap.relayed(self, self.upstream.getresponse())
                except (OSError, http.client.HTTPException):
                    # The engine is gone: the caller's connection ends here too.
                    self.upstream, self.close_connection = None, True

            do_GET = do_POST = relay

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def relayed(self, handler, reply):
        answer = Answer(self.engine, handler.path, reply.status, reply.headers.get("content-type"))
        with self.lock:
            self.answers.setdefault(handler.headers.get("x-check-id"), []).append(answer)
        handler.send_response_only(reply.status, reply.reason)
        for name, value in reply.headers.items():
            if name.lower() not in HOP:
                handler.send_header(name, value)
        length = reply.headers.get("content-length")
        handler.send_header(*(("content-length", length) if length else ("transfer-encoding", "chunked")))
        handler.end_headers()
        while part := reply.read1(65536):
            answer.body += part
            handler.wfile.write(part if length else b"%x\r\n%s\r\n" % (len(part), part))
        reply.close()
        answer.ended.set()
        if not length:
            handler.wfile.write(b"0\r\n\r\n")

    def taken(self, name):
        """The answers to requests of this id, which are then forgotten."""
        with self.lock:
            answers = self.answers.pop(name, [])
        for answer in answers:
            answer.ended.wait(10)
        return answers

    def close(self):
        self.server.shutdown()
