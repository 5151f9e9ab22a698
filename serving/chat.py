"""POST /v1/chat/completions: what its bodies ask. Host only."""

import uuid

from jaxmm.request import Request
from serving.ask import Ask, Pictures, Served
from serving.chat_answers import ChatWriter
from serving.protocol import parse_chat_request
from serving.translate import media_urls, num_items, to_request


class ChatEndpoint:
    """Conversations with pictures, videos, tools and response formats."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def read(self, body: bytes) -> Ask:
        """See `serving.ask.Endpoint`."""
        served = self._served
        chat = parse_chat_request(body, served.model)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"

        def requests(pictures: Pictures) -> tuple[Request, ...]:
            return (to_request(chat, pictures, request_id=answer_id, served=served),)

        return Ask(
            id=answer_id,
            model=chat.model,
            stream=bool(chat.stream),
            urls=media_urls(chat),
            num_items=num_items(chat.messages),
            requests=requests,
            writer=ChatWriter(
                chat,
                answer_id=answer_id,
                model=served.model,
                token_bytes=served.tokenizer.token_bytes,
            ),
        )
