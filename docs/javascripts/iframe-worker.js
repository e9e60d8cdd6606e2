// A site that was opened from disk (file://) may start no worker, and the search is one. There its script runs in a
// hidden frame instead, with the two calls that a worker has: `postMessage` and `importScripts`.
if (location.protocol === "file:") {
  // The search looks for this name, to find its own files.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const base = new URL(url, document.baseURI).href;
      // What is sent before the script stands there waits for it.
      this.waiting = [];
      this.inside = inside;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, base).href;
          script.onload = done;
          script.onerror = () => failed(new Error(`cannot load ${script.src}`));
          inside.document.head.append(script);
        });
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      load(base).then(() => {
        const sent = this.waiting;
        this.waiting = null;
        for (const data of sent) this.deliver(data);
      });
    }

    deliver(data) {
      const event = new this.inside.MessageEvent("message", { data });
      this.inside.dispatchEvent(event);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    terminate() {}
  };
}
