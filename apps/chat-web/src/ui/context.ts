/** What every component may use. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { ChatsController } from "../app/chats";
import type { ModelController } from "../app/model";
import type { Settings } from "../app/settings";
import type { Store } from "../app/store";

export interface App {
  model: ModelController;
  chats: ChatsController;
  settings: Store<Settings>;
}

export const AppContext = createContext<App | null>(null);

export function useApp(): App {
  return useContext(AppContext)!;
}
