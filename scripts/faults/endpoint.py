"""An OpenAI-compatible server for `medusa distill --endpoint`: the same question has the same answer."""

import http.server
import json
import threading

MODEL = "answers"


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 256}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"Answer: {asked['messages'][-1]['content'][:12]}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        self.reply({"id": "1", "object": "chat.completion", "model": MODEL, "choices": [choice]})

    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Quiet(http.server.ThreadingHTTPServer):
    """Clients that are killed in the middle of an answer are what this is for."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass


def serve():
    """Starts a server; returns its address."""
    server = Quiet(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
