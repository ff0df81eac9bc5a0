package cuda

import "fmt"

// Code is a value of the enum CUresult of cuda.h.
type Code int

// The CUresult values that the stand-in programs return.
const (
	InvalidValue         Code = 1
	OutOfMemory          Code = 2
	DeviceUnavailable    Code = 46
	NoDevice             Code = 100
	InvalidDevice        Code = 101
	SystemNotReady       Code = 802
	SystemDriverMismatch Code = 803
	MPSConnectionFailed  Code = 805
	MPSRPCFailure        Code = 806
	MPSServerNotReady    Code = 807
	MPSMaxClientsReached Code = 808
	MPSClientTerminated  Code = 810
	Unknown              Code = 999
)

var codeNames = map[Code]string{
	InvalidValue: "CUDA_ERROR_INVALID_VALUE", OutOfMemory: "CUDA_ERROR_OUT_OF_MEMORY", DeviceUnavailable: "CUDA_ERROR_DEVICE_UNAVAILABLE",
	NoDevice: "CUDA_ERROR_NO_DEVICE", InvalidDevice: "CUDA_ERROR_INVALID_DEVICE", SystemNotReady: "CUDA_ERROR_SYSTEM_NOT_READY",
	SystemDriverMismatch: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", MPSConnectionFailed: "CUDA_ERROR_MPS_CONNECTION_FAILED",
	MPSRPCFailure: "CUDA_ERROR_MPS_RPC_FAILURE", MPSServerNotReady: "CUDA_ERROR_MPS_SERVER_NOT_READY",
	MPSMaxClientsReached: "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", MPSClientTerminated: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
	Unknown: "CUDA_ERROR_UNKNOWN",
}

func (c Code) String() string {
	if name, known := codeNames[c]; known {
		return name
	}
	return fmt.Sprintf("CUDA error %d", int(c))
}

// Error is a CUresult with a text that explains it. The stand-in programs exchange errors as JSON.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

// Errorf returns an Error with the code and a formatted text.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (e *Error) Error() string { return fmt.Sprintf("%v: %s", e.Code, e.Message) }
