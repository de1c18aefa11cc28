// The nodes of a template's program, as mlcpipe/compiler/text/template_nodes.py writes them.
#ifndef MLCPIPE_RUNTIME_TEXT_TEMPLATE_OPS_H_
#define MLCPIPE_RUNTIME_TEXT_TEMPLATE_OPS_H_

// OP(name, what it is, operands). What: e an expression, b a statement, t a target of an assignment, a arguments,
// f the condition of a loop. Operands: e, b, t, a, f a node of that kind, in capitals its index + 1 or 0 for none;
// s a string; n a number; parts in brackets repeat. A node only refers to nodes before it.
#define MLCPIPE_TEMPLATE_OPS(OP)                                                              \
  OP(Missing, 'e', "")                                                                        \
  OP(None, 'e', "")                                                                           \
  OP(True, 'e', "")                                                                           \
  OP(False, 'e', "")                                                                          \
  OP(Int, 'e', "nn")        /* low, high */                                                   \
  OP(Float, 'e', "nn")                                                                        \
  OP(String, 'e', "s")                                                                        \
  OP(Load, 'e', "nns")      /* functions to go out, slot, name */                             \
  OP(Tuple, 'e', "(e)")                                                                       \
  OP(List, 'e', "(e)")                                                                        \
  OP(Dict, 'e', "(ee)")                                                                       \
  OP(Cond, 'e', "eeEs")     /* test, then, else, or why there is no value */                  \
  OP(And, 'e', "ee")                                                                          \
  OP(Or, 'e', "ee")                                                                           \
  OP(Not, 'e', "e")                                                                           \
  OP(Negative, 'e', "e")                                                                      \
  OP(Positive, 'e', "e")                                                                      \
  OP(Binary, 'e', "nee")    /* + - * / // % ** */                                             \
  OP(Concat, 'e', "(e)")                                                                      \
  OP(Compare, 'e', "e(ne)") /* == != > >= < <= in, not in */                                  \
  OP(GetAttr, 'e', "es")                                                                      \
  OP(GetItem, 'e', "ee")                                                                      \
  OP(Slice, 'e', "eEEE")                                                                      \
  OP(Call, 'e', "ea")                                                                         \
  OP(Filter, 'e', "sea")                                                                      \
  OP(Test, 'e', "sea")                                                                        \
  OP(Map, 'e', "sea")       /* a filter for each item */                                      \
  OP(MapAttr, 'e', "eee")   /* items, attribute, default */                                   \
  OP(Select, 'e', "neesa")  /* 1 to keep or 0 to drop, items, attribute, test or "", its arguments */ \
  OP(Capture, 'e', "b")                                                                       \
  OP(Macro, 'e', "snnnnBb(nsE)") /* name, slots, those + 1 of caller, kwargs, varargs, loads, body, parameters */ \
  OP(Fail, 'e', "ss")       /* type, text */                                                  \
  OP(Arguments, 'a', "EE(se)") /* *args, **kwargs, names or "", values */                     \
  OP(Block, 'b', "(b)")                                                                       \
  OP(Data, 'b', "s")                                                                          \
  OP(Output, 'b', "e")                                                                        \
  OP(Set, 'b', "te")                                                                          \
  OP(If, 'b', "ebB")                                                                          \
  OP(For, 'b', "tEnFbB")    /* target, items, slot of `loop` + 1, condition, body, else */    \
  OP(Recursive, 'b', "nbe") /* slots, For without items, items of the first call */           \
  OP(Break, 'b', "")                                                                          \
  OP(Continue, 'b', "")                                                                       \
  OP(Resolve, 'b', "ns")    /* slot, name of a variable or function */                        \
  OP(Alias, 'b', "nnn")     /* slot, functions to go out, slot there */                       \
  OP(Clear, 'b', "(n)")                                                                       \
  OP(Store, 't', "n")                                                                         \
  OP(StoreAttr, 't', "nns") /* functions to go out, slot, attribute of the namespace */       \
  OP(StoreTuple, 't', "(t)")                                                                  \
  OP(LoopTest, 'f', "nBte")

#endif  // MLCPIPE_RUNTIME_TEXT_TEMPLATE_OPS_H_
