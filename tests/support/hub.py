"A small Hugging Face hub: what an upload asks for, and whatever arrived"

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(BaseHTTPRequestHandler):
    "Large files by git LFS, others within the commit, as the real one asks for them"

    def log_message(self, *args): ...

    def body(self):
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def answer(self, found, status=200):
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self):
        self.server.stored[self.path.rpartition('/')[2]] = self.body()
        self.answer({})

    def do_GET(self):
        self.answer(dict(error=self.path), 404)

    def do_POST(self):
        body, here = self.body(), self.server.address
        self.server.asked.append(self.path)
        if self.headers.get('Authorization') != 'Bearer good':
            return self.answer(dict(error='Invalid username or password.'), 401)
        if self.path == '/api/repos/create':
            self.server.created = json.loads(body)
            self.answer(dict(url=f'{here}/me/mine'))
        elif 'preupload' in self.path:
            files = [f['path'] for f in json.loads(body)['files']]
            mode = {f: 'lfs' if f.endswith('.safetensors') else 'regular' for f in files}
            self.answer(
                dict(files=[dict(path=f, uploadMode=mode[f], shouldIgnore=False) for f in files])
            )
        elif self.path.endswith('objects/batch'):
            objects = json.loads(body)['objects']
            for o in objects:
                o['actions'] = dict(upload=dict(href=f'{here}/put/{o["oid"]}'))
            self.answer(dict(transfer='basic', objects=objects))
        else:
            for line in map(json.loads, body.splitlines()):
                v = line['value']
                if line['key'] == 'file':
                    self.server.files[v['path']] = base64.b64decode(v['content'])
                elif line['key'] == 'lfsFile':
                    self.server.files[v['path']] = self.server.stored[v['oid']]
            self.answer(dict(commitUrl=f'{here}/me/mine/commit/1', commitOid='1' * 40))


@contextmanager
def hub():
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.address = f'http://127.0.0.1:{server.server_port}'
    server.files, server.stored, server.asked = {}, {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
