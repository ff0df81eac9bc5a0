// Package nvmlx has what the rooms share of NVML: it opens the library, bounds calls in time, and
// makes errors of return codes.
package nvmlx
