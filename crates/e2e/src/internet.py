"""The internet of a test: servers on loopback addresses. Prints their ports as JSON and serves until its input ends.

Arguments: a directory of files, a certificate, its key.
"""
import hashlib
import http.server
import json
import os
import socketserver
import ssl
import sys
import threading
import time

root, certificate, key = sys.argv[1:4]
PIECE = bytes(range(256)) * 1024
counting = threading.Lock()
ends = {"ended": 0, "reset": 0}


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments):
        super().__init__(*arguments, directory=root)

    def log_message(self, *_):
        pass

    def start(self, length=None, kind="application/octet-stream"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self):
        what, _, count = self.path.strip("/").partition("/")
        if what == "big":
            left = int(count)
            self.start(left)
            while left > 0:
                self.wfile.write(PIECE[:left])
                left -= len(PIECE[:left])
        elif what == "slow":
            self.start()
            for _ in range(int(count)):
                self.wfile.write(b".")
                self.wfile.flush()
                time.sleep(1)
        elif what == "never":
            time.sleep(3600)
        elif what == "head":
            self.tell_head()
        elif what == "ends":
            with counting:
                text = json.dumps(ends).encode()
            self.start(len(text), "application/json")
            self.wfile.write(text)
        else:
            super().do_GET()

    def do_POST(self):
        self.tell_head()

    def tell_head(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {"line": self.requestline, "headers": self.headers.items(), "body": len(body)}
        text = json.dumps(said).encode()
        self.start(len(text), "application/json")
        self.wfile.write(text)


class Raw(socketserver.BaseRequestHandler):
    """Hears everything to its end, and then says what it was."""

    def handle(self):
        digest = hashlib.sha256()
        while piece := self.request.recv(65536):
            digest.update(piece)
        self.request.sendall(digest.hexdigest().encode())


class Held(socketserver.BaseRequestHandler):
    """Greets, and then waits for the other end to go. How it went is at /ends."""

    def handle(self):
        self.request.sendall(b"hello\n")
        try:
            while self.request.recv(65536):
                pass
            how = "ended"
        except ConnectionResetError:
            how = "reset"
        with counting:
            ends[how] += 1


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, *_):
        pass


class Secure(Server):
    def get_request(self):
        connection, peer = super().get_request()
        # The handshake is for the thread of the connection.
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
ports = {}
for name, kind, handler in [("https", Secure, Handler), ("http", Server, Handler), ("raw", Server, Raw), ("held", Server, Held)]:
    server = kind(("127.0.0.1", 0), handler)
    ports[name] = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps(ports), flush=True)
sys.stdin.read()
os._exit(0)
