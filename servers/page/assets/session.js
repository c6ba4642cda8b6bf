// A session on the server, over its WebSocket in the dialect ropewalk.v1 (docs/protocol.md). It outlives a
// connection that breaks: each request is executed once.

const LEASE_S = 60, RETRY_MS = 1000, BROKEN = [1005, 1006, 1011];

class RefusedError extends Error {
  constructor({ message, ...told }) {
    super(message);
    Object.assign(this, told);
  }
}

const base64 = (text) => btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

class Link {
  #id = 0;
  #read = 0;
  #waiting = new Map();
  #session = null;
  #lostAt = null;

  /** `told` has what is called: queue(place), lost(), back(), ended(why). */
  constructor(token, told) {
    this.protocols = token ? ["ropewalk.v1", `ropewalk.token.${base64(token)}`] : ["ropewalk.v1"];
    this.told = told;
    this.over = false;
  }

  /** Take a session; settled when there is one, after a wait in the queue where every slot is taken. */
  async open() {
    this.#connect();
    const { session, secret } = await this.#ask({ op: "open", lease_s: LEASE_S });
    this.#session = { session, secret };
  }

  /** Ask for a reset, a step, the state, or by JSON-RPC; return the data of the answer. */
  async ask(type, data) {
    return (await this.#ask({ type, data })).data;
  }

  /** Give the session back. */
  close(why = null) {
    if (this.over) return;
    this.over = true;
    this.socket.close(1000);
    for (const { reject } of this.#waiting.values()) reject(new RefusedError({ message: why ?? "The session has ended.", code: "ENDED" }));
    this.#waiting.clear();
    this.told.ended(why);
  }

  #ask(request) {
    const id = ++this.#id;
    const answer = new Promise((resolve, reject) => this.#waiting.set(id, { request: { id, ...request }, resolve, reject }));
    if (this.over) this.#settle({ id, error: { message: "The session has ended.", code: "ENDED" } });
    else if (this.ready) this.#send(id);
    return answer;
  }

  #send(id) {
    this.socket.send(JSON.stringify({ ...this.#waiting.get(id).request, read: this.#read }));
  }

  #connect() {
    const address = new URL("../ws", location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    if (this.#session) address.searchParams.set("resume", this.#session.session);
    const socket = (this.socket = new WebSocket(address, this.protocols));
    this.ready = false;
    socket.onopen = () => {
      if (this.#session) socket.send(JSON.stringify({ id: 0, op: "resume", ...this.#session, read: this.#read }));
      else this.#goOn(0);
    };
    socket.onmessage = (event) => this.socket === socket && this.#hear(JSON.parse(event.data));
    socket.onclose = (event) => this.socket === socket && this.#broken(event);
  }

  #goOn(taken) {
    this.ready = true;
    for (const id of this.#waiting.keys()) if (id > taken) this.#send(id);
  }

  #hear(frame) {
    if (frame.id !== 0) {
      this.#read += 1;
      this.#settle(frame);
    } else if (frame.error) {
      this.close("The session was lost with its connection.");
    } else {
      this.#lostAt = null;
      this.told.back();
      this.#goOn(frame.taken);
    }
  }

  #settle(frame) {
    if (frame.queue) return this.told.queue(frame.queue);
    const waits = this.#waiting.get(frame.id);
    const error = frame.error ?? (frame.type === "error" ? frame.data : null);
    this.#waiting.delete(frame.id);
    if (!error) return waits?.resolve(frame);
    waits?.reject(new RefusedError(error));
    if (!this.#session || error.code === "SESSION_ERROR" || error.code === "FACTORY_ERROR") this.close(error.message);
  }

  #broken({ code }) {
    if (this.over) return;
    this.#lostAt ??= Date.now();
    if (this.#session && BROKEN.includes(code) && Date.now() - this.#lostAt < 1000 * LEASE_S) {
      this.told.lost();
      setTimeout(() => this.over || this.#connect(), RETRY_MS);
    } else if (this.#session) this.close(code === 1000 ? "The server has ended the session." : "The server is stopping.");
    else this.close("The server could not be reached.");
  }
}
