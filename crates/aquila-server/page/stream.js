// Requests to this server, and the events of its streams.

/** What the server answered instead of what was asked for. */
class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request with the key; throws what the server says if it refuses. */
async function ask(path, key, body, signal) {
  const headers = {};
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { headers, signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  if (response.ok) return response;
  const text = await response.text();
  let message = text || `The server answered ${response.status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // A proxy may answer with something else than the server's JSON.
  }
  throw new ServerError(response.status, message);
}

/** The JSON of each event of a stream until its end. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, "The connection was lost before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.code ?? 0, event.error.message);
      yield event;
    }
  }
}

/** What is asked for: `settings` as the page has them, `messages` as they were written. */
function requestFor(settings, messages, seed) {
  const body = { stream: true, stream_options: { include_usage: true }, seed, return_draft_trees: true };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  if (!settings.speculative) body.speculative = false;
  if (settings.route === "text") {
    return { path: "/v1/completions", body: { ...body, prompt: messages.at(-1).content } };
  }
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return { path: "/v1/chat/completions", body: { ...body, messages: [...system, ...messages] } };
}
