// Package mig reads through NVML how a GPU can be partitioned and how it is. It changes nothing.
package mig
