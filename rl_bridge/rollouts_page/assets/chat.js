// What chat templates write around messages, taken apart again for reading. What is not known stays as it is.

const OPENS = /<\|im_start\|>\s*([\w-]+)[ \n]?|<\|start_header_id\|>([\w-]+)<\|end_header_id\|>\n{0,2}/g;
const CLOSES = /\s?<\|(?:im_end|eot_id|eom_id|begin_of_text|end_of_text|endoftext)\|>/g;
const RESPONSE = /<tool_response>\n?([\s\S]*?)\n?<\/tool_response>\n?/g;

/** A context as [{role, text}]; role is "" where no marker says one. */
function splitRoles(text) {
  const parts = [];
  let role = "", from = 0;
  const end = (to) => {
    const said = text.slice(from, to).replace(CLOSES, "");
    if (said.trim()) parts.push(...splitResponses(role, said.trimEnd().replace(/^\n+/, "")));
  };
  for (const match of text.matchAll(OPENS)) {
    end(match.index);
    role = match[1] ?? match[2];
    from = match.index + match[0].length;
  }
  end(text.length);
  return parts;
}

/** Results of tools, which some templates put into a user's message. */
function splitResponses(role, text) {
  const parts = [];
  let from = 0;
  const say = (who, what) => what.trim() && parts.push({ role: who, text: what });
  for (const match of text.matchAll(RESPONSE)) {
    say(role, text.slice(from, match.index));
    say("tool", match[1]);
    from = match.index + match[0].length;
  }
  say(role, text.slice(from));
  return parts;
}

/** The context with a note where its middle is missing. */
function wholeContext(turn) {
  if (!turn.left_out) return turn.context;
  const characters = Array.from(turn.context);
  const note = `\n… ${turn.left_out.characters.toLocaleString("en-US")} characters are not kept …\n`;
  return characters.slice(0, turn.left_out.at).join("") + note + characters.slice(turn.left_out.at).join("");
}

const THOUGHT = /<think>[\s\S]*?(?:<\/think>|$)/g;
const CALL = /<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<\|python_tag\|>[\s\S]*?(?=<\||$)/g;
const NAME = /"name"\s*:\s*"([^"]*)/;
const ARGUMENTS = /"(?:parameters|arguments)"\s*:/;

/** Whether an answer is a call without a mark: an object, and nothing but special tokens behind it. */
function isBareCall(text) {
  if (!text.trimStart().startsWith("{")) return false;
  const behind = text.slice(text.lastIndexOf("}") + 1).trimStart();
  return (!behind || behind.startsWith("<|")) && ARGUMENTS.test(text) && NAME.test(text);
}

/** Stretches of an answer that mean something: [{kind, from, to, tool}], in order, by characters. */
function answerParts(text) {
  const parts = [];
  for (const match of text.matchAll(THOUGHT)) {
    parts.push({ kind: "think", from: match.index, to: match.index + match[0].length });
  }
  const call = (from, found) =>
    parts.push({ kind: "call", from, to: from + found.length, tool: NAME.exec(found)?.[1] ?? "?" });
  const thoughts = [...parts];
  let next = 0;
  for (const match of text.matchAll(CALL)) {
    while (next < thoughts.length && thoughts[next].to <= match.index) next += 1;
    if (next === thoughts.length || match.index < thoughts[next].from) call(match.index, match[0]);
  }
  if (!parts.length && isBareCall(text)) call(0, text.replace(/<\|[^<]*$/, ""));
  return parts.sort((a, b) => a.from - b.from);
}
