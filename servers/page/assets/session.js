// A session on the server, over its WebSocket in the dialect ropewalk.v1 (docs/protocol.md). It outlives a
// connection that breaks: each request is executed once.

const LEASE_S = 60, RETRY_MS = 1000, RESUMABLE_CODES = [1005, 1006, 1011];

class RefusedError extends Error {
  constructor({ message, ...fields }) {
    super(message);
    Object.assign(this, fields);
  }
}

const base64 = (text) => btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

class ServerSession {
  #lastId = 0;
  #readCount = 0;
  #pending = new Map();
  #credentials = null;
  #brokenAt = null;

  /** `callbacks`: onQueue(status), onBreak(), onResume(), onEnd(reason). */
  constructor(token, callbacks) {
    this.protocols = token ? ["ropewalk.v1", `ropewalk.token.${base64(token)}`] : ["ropewalk.v1"];
    this.callbacks = callbacks;
    this.closed = false;
  }

  /** Take a session; settled when there is one, after a wait in the queue where every slot is taken. */
  async open() {
    this.#connect();
    const { session, secret } = await this.#ask({ op: "open", lease_s: LEASE_S });
    this.#credentials = { session, secret };
  }

  /** Ask for a reset, a step, the state, or by JSON-RPC; return the data of the answer. */
  async ask(type, data) {
    return (await this.#ask({ type, data })).data;
  }

  /** Give the session back. */
  close(reason = null) {
    if (this.closed) return;
    this.closed = true;
    this.socket.close(1000);
    for (const { reject } of this.#pending.values()) reject(new RefusedError({ message: reason ?? "The session has ended.", code: "ENDED" }));
    this.#pending.clear();
    this.callbacks.onEnd(reason);
  }

  #ask(request) {
    const id = ++this.#lastId;
    const answer = new Promise((resolve, reject) => this.#pending.set(id, { request: { id, ...request }, resolve, reject }));
    if (this.closed) this.#settle({ id, error: { message: "The session has ended.", code: "ENDED" } });
    else if (this.ready) this.#send(id);
    return answer;
  }

  #send(id) {
    this.socket.send(JSON.stringify({ ...this.#pending.get(id).request, read: this.#readCount }));
  }

  #connect() {
    const address = new URL("../ws", location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    if (this.#credentials) address.searchParams.set("resume", this.#credentials.session);
    const socket = (this.socket = new WebSocket(address, this.protocols));
    this.ready = false;
    socket.onopen = () => {
      if (this.#credentials) socket.send(JSON.stringify({ id: 0, op: "resume", ...this.#credentials, read: this.#readCount }));
      else this.#sendPending(0);
    };
    socket.onmessage = (event) => this.socket === socket && this.#receive(JSON.parse(event.data));
    socket.onclose = (event) => this.socket === socket && this.#onClose(event);
  }

  #sendPending(lastId) {
    this.ready = true;
    for (const id of this.#pending.keys()) if (id > lastId) this.#send(id);
  }

  #receive(frame) {
    if (frame.id !== 0) {
      this.#readCount += 1;
      this.#settle(frame);
    } else if (frame.error) {
      this.close("The session was lost with its connection.");
    } else {
      this.#brokenAt = null;
      this.callbacks.onResume();
      this.#sendPending(frame.taken);
    }
  }

  #settle(frame) {
    if (frame.queue) return this.callbacks.onQueue(frame.queue);
    const pending = this.#pending.get(frame.id);
    const error = frame.error ?? (frame.type === "error" ? frame.data : null);
    this.#pending.delete(frame.id);
    if (!error) return pending?.resolve(frame);
    pending?.reject(new RefusedError(error));
    if (!this.#credentials || error.code === "SESSION_ERROR" || error.code === "FACTORY_ERROR") this.close(error.message);
  }

  #onClose({ code }) {
    if (this.closed) return;
    this.#brokenAt ??= Date.now();
    if (this.#credentials && RESUMABLE_CODES.includes(code) && Date.now() - this.#brokenAt < 1000 * LEASE_S) {
      this.callbacks.onBreak();
      setTimeout(() => this.closed || this.#connect(), RETRY_MS);
    } else if (this.#credentials) this.close(code === 1000 ? "The server has ended the session." : "The server is stopping.");
    else this.close("The server could not be reached.");
  }
}
