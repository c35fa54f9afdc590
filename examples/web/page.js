// The page: what is chosen runs, or it says why not and what runs instead.

import { Decoder, drawn, likeliest } from "./decoder.js";
import { draw, notesOf, play } from "./music.js";

const at = (id) => document.getElementById(id);
const tune = await (await fetch("tune.json")).json();
const given = notesOf(tune.prompt, tune.kinds).steps;
let decoder = null;
let shown = tune.prompt;
let sound = null;

const say = (text) => (at("status").textContent = text);
const show = (options = {}) => draw(at("roll"), notesOf(shown, tune.kinds), { given, ...options });

async function open(provider) {
  if (decoder?.asked === provider) return;
  await decoder?.close();
  decoder = null;
  say("Loading …");
  let why = "";
  let opened;
  try {
    opened = await Decoder.open("decoder.onnx", provider);
  } catch (error) {
    if (provider === "wasm") throw error;
    why = `Not on WebGPU: ${error.message}. `;
    opened = await Decoder.open("decoder.onnx", "wasm");
  }
  decoder = Object.assign(opened, { asked: provider, why });
  say(`${why}Ready on ${name()}.`);
}

const name = () => ({ wasm: "WebAssembly", webgpu: "WebGPU" })[decoder.provider];

function stop() {
  sound?.context.close();
  sound = null;
  at("stop").disabled = true;
  show();
}

async function make() {
  stop();
  at("make").disabled = true;
  try {
    await open(at("provider").value);
    const count = at("count").valueAsNumber;
    const temperature = Number(at("temperature").value);
    const room = given + count;
    shown = [...tune.prompt];
    const begun = performance.now();
    for await (const token of decoder.generate(tune.prompt, count, temperature ? drawn(temperature) : likeliest)) {
      shown.push(token);
      if (shown.length % 8 === 0) {
        show({ room });
        await new Promise(requestAnimationFrame);
      }
    }
    const rate = (count / (performance.now() - begun)) * 1000;
    say(`${decoder.why}${count} tokens on ${name()}, ${rate.toFixed(0)} a second.`);
    listen();
  } catch (error) {
    say(`Error: ${error.message}`);
    throw error;
  } finally {
    at("make").disabled = false;
  }
}

function listen() {
  const music = notesOf(shown, tune.kinds);
  sound = play(music, tune.secondsPerStep);
  at("stop").disabled = false;
  const { context, start } = sound;
  const follow = () => {
    if (sound?.context !== context) return;
    const now = (context.currentTime - start) / tune.secondsPerStep;
    if (now >= music.steps) return stop();
    show({ now });
    requestAnimationFrame(follow);
  };
  follow();
}

at("title").textContent = `“${tune.title}”`;
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  make();
});
at("stop").addEventListener("click", stop);
at("provider").addEventListener("change", () => open(at("provider").value).catch((error) => say(`Error: ${error.message}`)));
addEventListener("resize", () => sound ?? show());
show();
open(at("provider").value).catch((error) => say(`Error: ${error.message}`));
