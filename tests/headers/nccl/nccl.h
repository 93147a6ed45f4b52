// SPDX-License-Identifier: Apache-2.0
// NCCL's declarations that fsdp uses, as version FSDP_TEST_NCCL (22703 for 2.27.3) has them: what a version lacks is not
// declared. Read off nccl.h of 2.19.3, 2.26.5, 2.27.3, 2.28.9 and 2.32.3.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>

#define NCCL_VERSION_CODE FSDP_TEST_NCCL

typedef struct ncclComm* ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;
typedef enum {
  ncclUint8 = 1,
  ncclInt64 = 4,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9
} ncclDataType_t;
typedef struct {
  size_t size;
  int blocking;
  int maxCTAs;
#if FSDP_TEST_NCCL >= 22700
  int CTAPolicy;
#endif
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {}
#if FSDP_TEST_NCCL >= 22800
#define NCCL_CTA_POLICY_ZERO 0x02
#endif

extern "C" {
ncclResult_t ncclGetVersion(int*);
ncclResult_t ncclGetUniqueId(ncclUniqueId*);
char const* ncclGetErrorString(ncclResult_t);
char const* ncclGetLastError(ncclComm_t);
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*);
ncclResult_t ncclCommFinalize(ncclComm_t);
ncclResult_t ncclCommDestroy(ncclComm_t);
ncclResult_t ncclCommAbort(ncclComm_t);
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*);
ncclResult_t ncclCommCount(ncclComm_t, int*);
ncclResult_t ncclCommCuDevice(ncclComm_t, int*);
ncclResult_t ncclCommUserRank(ncclComm_t, int*);
ncclResult_t ncclMemAlloc(void**, size_t);
ncclResult_t ncclMemFree(void*);
ncclResult_t ncclAllGather(void const*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclReduceScatter(void const*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclAllReduce(void const*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclBroadcast(void const*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
}

#if FSDP_TEST_NCCL >= 22700
#if FSDP_TEST_NCCL >= 22800
typedef struct ncclWindow_vidmem* ncclWindow_t;
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#else
typedef struct ncclWindow* ncclWindow_t;
#endif
#define NCCL_WIN_COLL_SYMMETRIC 0x01
extern "C" {
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int);
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t);
}
#endif
