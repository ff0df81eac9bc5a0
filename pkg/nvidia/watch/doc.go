// Package watch polls the GPUs' health and receives their events.
//
// [Run] starts a child process, which calls [Serve], and emits its signals. Package health judges
// them. While Run runs, NVML is open, so no driver can be unloaded and no GPU can be reset. When
// Run returns, NVML is closed. The package changes nothing on the GPUs.
//
// One child process watches all cards. It opens no MIG instance, because a handle blocks the
// removal of the instance. Before package cut changes a MIG mode, another process without that card
// takes over, because NVML closes a card only when its process ends. The same happens when a card
// comes to NVIDIA's driver or leaves it. A card that hangs gets a process of its own where it would
// delay the others.
//
// In the plugin's process: watcher starts and replaces the child processes, placeResolver finds the
// placements of MIG instances with events. In the child process: watchServer has a watchedGPU for
// each card, with a healthPoller and an eventLoop.
package watch
