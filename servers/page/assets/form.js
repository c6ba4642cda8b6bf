// Forms from JSON schemas: what an action, a reset or a call of a tool is made of.

const MAX_REFERENCES = 16, MAX_BUTTONS = 12, LONG_NAMES = /code|text|content|message|prompt|query|sql|answer|response|stdin|context|reason/;
const SECRET_NAMES = /token|secret|password|api_key/;

/** Follow references, each with what stands beside it. */
function resolved(schema, root) {
  for (let n = 0; n < MAX_REFERENCES && isObject(schema); n++) {
    const { $ref, ...found } = schema;
    if (typeof $ref === "string") schema = { ...$ref.replace(/^#\/?/, "").split("/").reduce((at, key) => at?.[key], root), ...found };
    else if (found.allOf?.length === 1) schema = { ...found.allOf[0], ...found, allOf: undefined };
    else return found;
  }
  return {};
}

function armsOf(schema, root, depth = 0) {
  const arms = schema.oneOf ?? schema.anyOf;
  if (!Array.isArray(arms) || depth > MAX_REFERENCES || schema.properties) return [schema];
  return arms.flatMap((arm) => armsOf(resolved(arm, root), root, depth + 1));
}

function choicesOf(arms) {
  const found = [];
  for (const arm of arms) {
    if ("const" in arm) found.push(arm.const);
    else if (Array.isArray(arm.enum)) found.push(...arm.enum);
    else if (arm.type === "boolean") found.push(true, false);
    else if (arm.type === "integer" && arm.maximum - arm.minimum < MAX_BUTTONS) for (let n = arm.minimum; n <= arm.maximum; n++) found.push(n);
    else return [];
  }
  return found;
}

const kindOf = (schema) => (Array.isArray(schema.type) ? schema.type.find((one) => one !== "null") : schema.type) ?? "any";

function fieldOf(name, part, root, required) {
  const about = resolved(part, root);
  const arms = armsOf(about, root), nonNull = arms.filter((arm) => arm.type !== "null");
  const schema = nonNull.length === 1 ? { ...about, ...nonNull[0] } : about;
  const kinds = new Set(nonNull.map(kindOf));
  return {
    name, required, schema, choices: choicesOf(nonNull), kind: kinds.size === 1 ? [...kinds][0] : "any",
    item: kindOf(resolved(schema.items ?? {}, root)), initial: about.default ?? schema.default, description: about.description ?? schema.description ?? "",
  };
}

/** The sorts of action that a schema allows: more than one where it is of a union. */
function formsOf(root) {
  return armsOf(resolved(root, root), root).map((schema) => {
    const required = schema.required ?? [];
    const form = { title: schema.title ?? "Action", description: schema.description ?? "", fields: [], fixed: {}, further: schema.additionalProperties === true };
    for (const [name, part] of Object.entries(schema.properties ?? {})) {
      const field = fieldOf(name, part, root, required.includes(name));
      if (name === "metadata" && !field.required) continue;
      if (field.choices.length === 1) form.fixed[name] = field.choices[0];
      else form.fields.push(field);
    }
    form.callsTools = ["tool_name", "arguments"].every((name) => form.fields.some((field) => field.name === name));
    form.listsTools = form.fixed.type === "list_tools";
    return form;
  });
}

/** The value that a text stands for; an Error says what would be one. */
function readText(kind, item, text) {
  if (kind === "string") return text;
  if (kind === "integer" || kind === "number") {
    const number = Number(text);
    if (!text.trim() || !Number.isFinite(number) || (kind === "integer" && !Number.isInteger(number))) throw new Error(kind === "integer" ? "Give a whole number." : "Give a number.");
    return number;
  }
  if (kind === "boolean" && /^(true|false)$/.test(text)) return text === "true";
  if (kind === "array" && !text.trim().startsWith("[")) return text.split(/[,\s]+/).filter(Boolean).map((one) => readText(item, "any", one));
  try {
    const value = JSON.parse(text);
    if ((kind === "object" && !isObject(value)) || (kind === "array" && !Array.isArray(value))) throw new Error();
    return value;
  } catch {
    if (kind === "any") return text;
    throw new Error(kind === "array" ? "Give a list: 1, 2, 3 or JSON." : `Give ${kind === "object" ? "a JSON object" : kind}.`);
  }
}

class FieldView {
  static #ids = 0;

  constructor(field) {
    this.field = field;
    const id = `field-${++FieldView.#ids}`;
    this.input = this.#input(id);
    this.error = make("p", { className: "wrong", id: `${id}-wrong`, hidden: true });
    this.input.setAttribute("aria-describedby", `${id}-hint ${id}-wrong`);
    this.element = make("div", { className: "field" },
      make("label", { htmlFor: id }, field.name.replaceAll("_", " "), field.required ? null : make("span", { className: "none", textContent: " optional" })),
      this.input, make("p", { className: "hint", id: `${id}-hint`, textContent: field.description }), this.error);
  }

  #input(id) {
    const { name, kind, schema, choices, initial, required } = this.field;
    const initialText = initial === undefined || initial === null ? "" : typeof initial === "string" ? initial : JSON.stringify(initial);
    if (choices.length) {
      const select = make("select", { id }, ...choices.map((one) => make("option", { value: JSON.stringify(one), textContent: String(one) })));
      if (required) return select;
      select.prepend(make("option", { value: "", textContent: initialText ? `default: ${initialText}` : "–" }));
      return Object.assign(select, { selectedIndex: 0 });
    }
    const common = { id, placeholder: initialText, autocomplete: "off", spellcheck: false };
    if (kind === "integer" || kind === "number") {
      const bounds = { min: schema.minimum ?? "", max: schema.maximum ?? "" };
      return make("input", { ...common, type: "number", step: kind === "integer" ? "1" : "any", ...bounds });
    }
    if (SECRET_NAMES.test(name)) return make("input", { ...common, type: "password" });
    const long = kind === "object" || kind === "any" || (kind === "string" && ((schema.maxLength ?? 0) > 200 || LONG_NAMES.test(name)));
    return long ? make("textarea", { ...common, className: /code|content|sql/.test(name) ? "tall" : "" }) : make("input", { ...common, type: "text" });
  }

  /** Put the field's value into an object, where there is one. */
  read(values) {
    this.showError("");
    const { name, kind, item, choices, required } = this.field, text = this.input.value;
    if (choices.length) return text && (values[name] = JSON.parse(text));
    if (!text && this.input.validity?.badInput) throw new Error("Give a number.");
    if (!text && !required) return null;
    if (!text && kind !== "string") throw new Error("This field is required.");
    return (values[name] = readText(kind, item, text));
  }

  show() {
    const details = this.element.closest("details");
    if (details) details.open = true;
    this.input.focus();
  }

  showError(message) {
    this.error.textContent = message;
    this.error.hidden = !message;
    this.input.ariaInvalid = `${Boolean(message)}`;
  }
}

/** A form on the page. `submit` is called with the values, and returns a promise. */
class FormView {
  constructor(form, label, submit, key = null) {
    this.form = form;
    this.key = key;
    this.submit = submit;
    const [only] = form.fields;
    this.isChoice = form.fields.length === 1 && only.required && only.choices.length > 1 && only.choices.length <= MAX_BUTTONS;
    this.fields = this.isChoice ? [] : form.fields.map((field) => new FieldView(field));
    if (form.further) this.fields.push((this.further = new FieldView({ name: "further_options", kind: "object", schema: {}, choices: [], required: false, description: "a JSON object" })));
    this.error = make("p", { className: "wrong", role: "alert", hidden: true });
    const [requiredFields, optionalFields] = [true, false].map((wanted) => this.fields.filter(({ field }) => Boolean(field.required) === wanted).map((field) => field.element));
    this.element = make("form", { className: "form", noValidate: true }, ...requiredFields,
      ...(requiredFields.length && optionalFields.length ? [make("details", {}, make("summary", { textContent: optionalFields.length > 1 ? `${optionalFields.length} more fields` : "another field" }), ...optionalFields)] : optionalFields));
    this.element.append(this.error, make("div", { className: "buttons" }, ...(this.isChoice ? this.#choices(only) : [this.#button(label)])));
    this.element.onsubmit = (event) => (event.preventDefault(), this.send());
    this.element.onkeydown = (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.send();
    };
  }

  #button(label) {
    const long = this.fields.some((field) => field.input.matches("textarea"));
    return make("button", { className: "do" }, label, " ", make("kbd", { textContent: this.key ?? (long ? "Ctrl ↵" : "↵") }));
  }

  #choices({ name, choices }) {
    return choices.map((one, at) => {
      const button = make("button", { type: "button", className: "do" }, String(one), at < 9 ? make("kbd", { textContent: at + 1 }) : null);
      button.onclick = () => this.#submit({ ...this.form.fixed, [name]: one });
      return button;
    });
  }

  /** Send what is filled in; the first field that is wrong says so. */
  send() {
    const values = { ...this.form.fixed };
    for (const field of this.fields) {
      try {
        field.read(values);
      } catch (error) {
        field.showError(error.message);
        field.show();
        return;
      }
    }
    const { further_options: further, ...others } = values;
    this.#submit(this.further ? { ...others, ...further } : values);
  }

  async #submit(values) {
    this.showError("");
    try {
      await this.submit(values);
    } catch (error) {
      this.showFaults(error);
    }
  }

  /** Say what the server refused, each fault at its field where it has one. */
  showFaults(error) {
    const messages = [];
    for (const { loc = [], msg } of error.errors ?? []) {
      const field = this.fields.find((one) => loc.includes(one.field.name));
      if (field) (field.showError(msg), field.show());
      else messages.push(loc.length ? `${loc.join(".")}: ${msg}` : msg);
    }
    this.showError(error.errors ? messages.join("\n") : error.message);
  }

  showError(message) {
    this.error.textContent = message;
    this.error.hidden = !message;
  }

  /** Press the button of a digit; whether there is one. */
  press(digit) {
    const button = this.isChoice ? this.element.querySelectorAll("button.do")[digit - 1] : null;
    button?.click();
    return Boolean(button);
  }

  focus() {
    (this.fields[0]?.input ?? this.element.querySelector("button")).focus();
  }
}
