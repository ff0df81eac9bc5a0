package mps

import (
	"os"
	"slices"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// attach is a client that wants to be let in.
type attach struct {
	pid  int32
	user uint32
	not  int
	gone bool
	// server is the one that it was told.
	server *server
}

// letIn serves a client, of whatever user.
func (c *control) letIn(connection *conn, who *syscall.Ucred, asked request) {
	client := &attach{pid: who.Pid, user: who.Uid, not: asked.Not}
	if c.multiUser {
		client.user = 0 // clients of all users appear as those of the root user
	}
	if os.Getuid() != 0 && who.Uid != uint32(os.Getuid()) {
		_ = connection.encoder.Encode(answer{Error: cuda.Errorf(cuda.MPSConnectionFailed, "the control daemon is user %d's and cannot serve user %d", os.Getuid(), who.Uid)})
		return
	}
	go c.watch(connection, client)
	_ = connection.encoder.Encode(c.admit(client, func() { _ = connection.encoder.Encode(answer{Pending: true}) }))
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if client.server == nil {
		return
	}
	for !client.gone { // it hangs up when the server has taken it in
		c.changed.Wait()
	}
	client.server.joining--
	c.changed.Broadcast()
}

// watch notices a client that gives up.
func (c *control) watch(connection *conn, client *attach) {
	var more request
	_ = connection.decoder.Decode(&more) // nothing comes; it ends when the client does
	c.mutex.Lock()
	client.gone = true
	c.mutex.Unlock()
	c.changed.Broadcast()
}

// admit returns when the client may connect to a server, or never will. Clients of one user come in at once; the first of another waits until the
// server has ended, and those who come later wait behind it.
func (c *control) admit(client *attach, pending func()) answer {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.waiting = append(c.waiting, client)
	defer func() {
		c.waiting = slices.DeleteFunc(c.waiting, func(other *attach) bool { return other == client })
		c.changed.Broadcast()
	}()
	for told := false; ; {
		switch {
		case client.gone:
			return answer{}
		case c.ending:
			return answer{Error: cuda.Errorf(cuda.MPSServerNotReady, "the control daemon ends")}
		case c.waiting[0] != client:
		case c.server == nil:
			c.startServer(client.user)
			continue
		case c.server.failed != nil:
			failed := c.server.failed
			c.server = nil
			return answer{Error: failed}
		case c.server.pid == client.not:
		case c.server.ready && !c.server.draining && c.server.user == client.user:
			c.log.printf("NEW CLIENT %d from user %d: Server already exists", client.pid, client.user)
			client.server = c.server
			c.server.joining++
			return answer{Socket: c.server.socket, Server: c.server.pid}
		case c.server.user != client.user && !c.server.draining && c.server.joining == 0:
			c.log.printf("NEW CLIENT %d from user %d: Server of user %d is asked to end", client.pid, client.user, c.server.user)
			c.server.drain()
			continue
		}
		if !told {
			told = true
			c.log.printf("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", client.pid, client.user)
			c.mutex.Unlock()
			pending()
			c.mutex.Lock()
			continue
		}
		c.changed.Wait()
	}
}
