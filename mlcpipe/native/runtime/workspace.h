// Memory that kernels take for the time of a call; each thread keeps it for the next one.
#ifndef MLCPIPE_RUNTIME_WORKSPACE_H_
#define MLCPIPE_RUNTIME_WORKSPACE_H_

namespace mlcpipe {

// Libraries that are loaded from now on take it here instead of from TVM.
void UseOwnWorkspaces();

// Makes what kernels of this thread have now free. For use when a kernel failed or was cancelled: TVM's code returns
// without giving its workspace back.
void ReclaimWorkspaces();

// Gives the system what no kernel of any thread has now.
void TrimWorkspaces();

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_WORKSPACE_H_
