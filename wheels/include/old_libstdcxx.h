/* Before every source of a wheel's plugin: what newer versions of libstdc++ export is compiled into the plugin, as the
 * versions that TVM's wheel runs with lack it. */
#include <bits/c++config.h>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
