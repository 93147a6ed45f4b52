# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, driven over its pipe: https://chromedevtools.github.io/devtools-protocol/"""
import json, os, pathlib, subprocess, sys


class Browser:
    def __init__(self, program):
        from_here, self.out = os.pipe()
        self.into, to_here = os.pipe()
        def place():  # the browser reads from descriptor 3 and writes to 4
            first, second = os.dup(from_here), os.dup(to_here)
            os.dup2(first, 3), os.dup2(second, 4)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--no-first-run", "--remote-debugging-pipe", "--user-data-dir=" + os.path.abspath("profile"), "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.rest, self.number, self.events, self.session = b"", 0, [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(domain + ".enable")

    def receive(self):
        while b"\0" not in self.rest:
            some = os.read(self.into, 1 << 20)
            if not some:
                sys.exit("the browser has ended")
            self.rest += some
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def ask(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self.out, text):]
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                return answer["result"] if "result" in answer else sys.exit(f"{method}: {answer}")
            self.events.append(answer)

    def open(self, file, width, height, mobile, scheme):
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=mobile)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=pathlib.Path(file).absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def value(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value", answer)

    def problems(self):
        """Errors of the page since it was opened, and its requests to a network."""
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                yield json.dumps(parameters)[:300]
            if method == "Network.requestWillBeSent" and parameters["request"]["url"].split(":")[0] not in ("file", "data"):
                yield f"it asks for {parameters['request']['url']}"

    def close(self):
        try:
            self.ask("Browser.close")
        except SystemExit:
            pass
        self.process.wait()
