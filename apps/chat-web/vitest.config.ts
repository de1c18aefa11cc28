import { defineConfig } from "vitest/config";

// The time limit is for machines that others use too.
export default defineConfig({ test: { include: ["tests/**/*.test.ts"], testTimeout: 60_000 } });
