// A client of `ropewalk.v1`, written from docs/protocol.md alone; Node 22 has all that it needs.
//
//   node ropewalk_client.mjs URL [OPTIONS]
//
// reads a request a line, {"op": "open", "lease_s": 30} for instance, "arrays" with their data beside the rest, and writes
// a line for each frame that answers one, and {"failed": WHY} where nothing can be asked any more. {"close": true} ends it.

import { createInterface } from "node:readline";

const PROTOCOL = "ropewalk.v1";
const MAX_UNDER_WAY = 32;
const MAX_PAUSE_MS = 1000;
const BREAKS = [1006, 1011];
const RESUME_ID = 0;
const ARRAYS = {
  bool: Uint8Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array,
  uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array, float32: Float32Array, float64: Float64Array,
};
const padded = (size) => Math.ceil(size / 8) * 8;
const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

/** Return a frame: text, or bytes where there are arrays. The machine is taken to be little-endian. */
export function encode(header, arrays) {
  if (arrays.length === 0) return JSON.stringify(header);
  const described = arrays.map(({ dtype, shape }) => ({ dtype, shape }));
  const text = new TextEncoder().encode(JSON.stringify({ ...header, arrays: described }));
  const parts = arrays.map(({ dtype, data }) => {
    const values = dtype.endsWith("64") && dtype !== "float64" ? data.map(BigInt) : data;
    return new Uint8Array(ARRAYS[dtype].from(values).buffer);
  });
  let at = padded(4 + text.length);
  const places = parts.map((part, number) => {
    const place = at;
    at += number + 1 < parts.length ? padded(part.length) : part.length;
    return place;
  });
  const frame = new Uint8Array(at);
  new DataView(frame.buffer).setUint32(0, text.length, true);
  frame.set(text, 4);
  parts.forEach((part, number) => frame.set(part, places[number]));
  return frame;
}

/** Return the header of a frame, with the data in its arrays. */
export function decode(frame) {
  if (typeof frame === "string") return JSON.parse(frame);
  const length = new DataView(frame).getUint32(0, true);
  const header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(frame, 4, length)));
  let at = padded(4 + length);
  for (const array of header.arrays) {
    const kind = ARRAYS[array.dtype];
    const count = sizeOf(array.shape);
    array.data = Array.from(new kind(frame, at, count), Number);
    at += padded(count * kind.BYTES_PER_ELEMENT);
  }
  return header;
}

/** Sessions on a server, which outlive a connection that breaks. */
export class Link {
  #url;
  #leaseMs;
  #patienceMs;
  #answered;
  #failed;
  #socket;
  #ready = false; // requests can be sent over the socket
  #closing = false;
  #next = 1;
  #read = 0;
  #pending = new Map(); // frames of requests that are still to be answered, by id
  #room = [];
  #known; // session and secret
  #deadline; // to be connected again
  #pauseMs = 20;
  #silence;

  /**
   * @param url ws://HOST:PORT/ws
   * @param answered is given each frame that answers a request
   * @param failed is told why nothing can be asked any more
   * @param leaseS how long to try to come back
   * @param patienceS after how long without any frame, while one is to come, a connection is taken to be dead
   */
  constructor(url, { answered, failed, leaseS = 30, patienceS = 60 }) {
    this.#url = url;
    this.#answered = answered;
    this.#failed = failed;
    this.#leaseMs = leaseS * 1000;
    this.#patienceMs = patienceS * 1000;
    this.#connect();
  }

  /** Send a request, once the server takes another. */
  async ask(header, arrays = []) {
    while (this.#pending.size >= MAX_UNDER_WAY) await new Promise((resolve) => this.#room.push(resolve));
    const id = this.#next++;
    const frame = encode({ id, read: this.#read, ...header }, arrays);
    this.#pending.set(id, frame);
    if (this.#ready) this.#socket.send(frame);
    this.#watch();
  }

  /** End the sessions. */
  close() {
    this.#closing = true;
    this.#socket.close(1000);
  }

  #connect() {
    const query = this.#known ? `?resume=${encodeURIComponent(this.#known.session)}` : "";
    const socket = new WebSocket(this.#url + query, PROTOCOL);
    this.#socket = socket;
    this.#ready = false;
    socket.binaryType = "arraybuffer";
    const mine = (handler) => (event) => socket === this.#socket && handler(event);
    socket.onopen = mine(() => this.#begin());
    socket.onmessage = mine((event) => this.#take(decode(event.data)));
    socket.onclose = mine((event) => this.#lost(event.code));
    socket.onerror = mine(() => this.#lost(1006)); // of a handshake that fails nothing else is told
    this.#watch();
  }

  #begin() {
    if (this.#socket.protocol !== PROTOCOL) {
      this.#fail("the server does not speak this dialect");
    } else if (this.#known) {
      this.#socket.send(JSON.stringify({ id: RESUME_ID, op: "resume", ...this.#known, read: this.#read }));
    } else {
      this.#read = 0;
      this.#sendBehind(-1); // nobody has answered the `open`: all of it begins anew
    }
  }

  #sendBehind(taken) {
    this.#ready = true;
    this.#deadline = undefined;
    this.#pauseMs = 20;
    for (const [id, frame] of this.#pending) if (id > taken) this.#socket.send(frame);
  }

  #take(header) {
    if (header.id === RESUME_ID && !this.#ready) {
      if (header.error) this.#fail(header.error.message);
      else this.#sendBehind(header.taken);
      return this.#watch();
    }
    if (typeof header.id !== "number") return this.#fail(JSON.stringify(header));
    this.#read += 1;
    if (header.session) this.#known = { session: header.session, secret: header.secret };
    if (header.last !== false) {
      this.#pending.delete(header.id);
      this.#room.shift()?.();
    }
    this.#watch();
    this.#answered(header);
  }

  /** Look after a connection on which something is to come; one that stays silent is replaced. */
  #watch() {
    clearTimeout(this.#silence);
    if (this.#ready && this.#pending.size === 0) return;
    this.#silence = setTimeout(() => this.#lost(1006), this.#patienceMs);
  }

  #lost(code) {
    clearTimeout(this.#silence);
    const former = this.#socket;
    this.#socket = undefined;
    if (this.#closing) return;
    if (!BREAKS.includes(code)) return this.#fail(`the server has closed the connection with ${code}`);
    former.onopen = () => former.close(); // too late; one that was open stays so, for to close it ends the sessions
    this.#ready = false;
    this.#deadline ??= Date.now() + this.#leaseMs;
    if (Date.now() > this.#deadline) return this.#fail("no connection within the lease");
    setTimeout(() => this.#closing || this.#connect(), this.#pauseMs * (0.5 + Math.random() / 2));
    this.#pauseMs = Math.min(2 * this.#pauseMs, MAX_PAUSE_MS);
  }

  #fail(why) {
    clearTimeout(this.#silence);
    this.#closing = true;
    this.#socket?.close();
    this.#failed(why);
  }
}

if (process.argv[2]) {
  const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
  const options = JSON.parse(process.argv[3] ?? "{}");
  const link = new Link(process.argv[2], { answered: say, failed: (failed) => say({ failed }), ...options });
  for await (const line of createInterface({ input: process.stdin })) {
    const { close, arrays, ...header } = JSON.parse(line);
    if (close) link.close();
    else await link.ask(header, arrays);
  }
}
