import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: [".venv/", "build/", "node_modules/"] },
  js.configs.recommended,
  {
    files: ["**/static/**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    rules: {
      curly: "error",
      eqeqeq: ["error", "always", { null: "ignore" }],
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "no-var": "error",
      "prefer-const": "error",
    },
  },
  // Classic scripts: the page must run them before it is painted, or while it is read.
  { files: ["**/static/{theme,reload}.js"], languageOptions: { sourceType: "script" } },
];
