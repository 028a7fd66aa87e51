// Answers to questions, as the site's search gives them: node ask.js SITE QUESTION...
const fs = require("fs");
const vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const page = { getElementById: () => null };
const window = vm.createContext({ document: page, SPHINX_HIGHLIGHT_ENABLED: false, _ready() {}, _: String });
window.window = window;
for (const script of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${script}`, "utf8"), window);
const answers = (question) => {
  window.question = question;
  return vm.runInContext("Search._performSearch(...Search._parseQuery(question))", window)
    .map(([name, , anchor]) => name + anchor).reverse();
};
console.log(JSON.stringify(questions.map(answers)));
