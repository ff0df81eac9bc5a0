// Package child has what the rooms share of their child processes.
package child
