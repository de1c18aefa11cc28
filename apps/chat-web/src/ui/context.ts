/** The context of all components. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { ChatsController } from "../app/chats";
import type { ModelController, ModelSource } from "../app/model";
import type { ServerModel } from "../app/server";
import type { Settings } from "../app/settings";
import type { Store } from "../app/store";

export interface App {
  model: ModelSource;
  /** The one of both that `model` is. */
  browser: ModelController | null;
  server: ServerModel | null;
  chats: ChatsController;
  settings: Store<Settings>;
}

export const AppContext = createContext<App | null>(null);

export function useApp(): App {
  return useContext(AppContext)!;
}

/** The model in this browser, for parts that are only shown with one. */
export function useBrowserModel(): ModelController {
  return useApp().browser!;
}
